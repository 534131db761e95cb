"""The records in benchmarks/results by name, and how pages write them."""

import pathlib
import textwrap
from typing import Any

from benchmarks import record
from sparse_transformer import atomic

# What is counted, by the unit of bits.
SYMBOLS = {"bits/byte": "bytes", "bits/base": "bases", "bits/sample": "samples"}


def path(name: str) -> pathlib.Path:
  return record.FOLDER / f"{name}.json"


def read(name: str) -> Any:
  if not path(name).exists():
    raise FileNotFoundError(
      f"benchmarks/results/{name}.json is missing; pages have numbers from it"
    )
  return atomic.read_json(path(name))


def test_scores(run: dict[str, Any]) -> list[dict[str, Any]]:
  """Evaluations of the test split, the least minimum context first."""
  found = [x for x in run["evaluations"] if x["split"] == "test"]
  if not found:
    raise ValueError(
      f"the record of {run['command']!r} has no score of the test split: run"
      " eval.py and benchmarks.run"
    )
  return sorted(found, key=lambda x: x["min_context"])


def time_of(run: dict[str, Any]) -> str:
  """Training time in minutes: processor time, which depends less on others."""
  seconds, what = run.get("processor_seconds"), " of processor time"
  if seconds is None:
    seconds, what = run["seconds"], ""
  number = max(1, round(seconds / 60))
  return f"{number:,} minute{'s' * (number != 1)}{what}"


def decimals(unit: str, usual: int) -> int:
  """Decimals of bits: bits per base differ less than others."""
  return 4 if unit == "bits/base" else usual


def with_error(
  mean: float, error: float | None, digits: int, sign: str = ""
) -> str:
  """A mean, and its error if it has one.

  >>> with_error(1.2345, 0.0123, 3, sign="+")
  '+1.234 ± 0.012'
  """
  text = f"{mean:{sign}z.{digits}f}"  # z: no -0.00
  return text if error is None else f"{text} ± {error:.{digits}f}"


def wrap(text: str) -> str:
  """A paragraph, or a point of a list, in lines of at most 100 characters."""
  return textwrap.fill(
    text,
    100,
    subsequent_indent="  " if text.startswith("- ") else "",
    break_long_words=False,
    break_on_hyphens=False,
  )


def origin(name: str, about: dict[str, Any], seeds: int = 0) -> str:
  """The origin of a record: command, seeds if any, machine and commit."""
  of_seeds = f"{seeds} seed{'s' * (seeds > 1)}; " if seeds else ""
  return f"```\n{about['command']}\n```\n\n" + wrap(
    f"[Record](../benchmarks/results/{name}.json): {of_seeds}"
    f"{about['machine']}; commit {about['commit']}."
  )
