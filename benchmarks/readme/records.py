"""The records by name, and numbers as the README writes them."""

import pathlib
from typing import Any

from benchmarks import record
from sparse_transformer import atomic

# What is counted, by the unit of bits.
SYMBOLS = {"bits/byte": "bytes", "bits/base": "bases", "bits/sample": "samples"}


def path(name: str) -> pathlib.Path:
  """The file of a record."""
  return record.FOLDER / f"{name}.json"


def exists(name: str) -> bool:
  return path(name).exists()


def read(name: str) -> Any:
  """The content of a record.

  Raises:
    FileNotFoundError: it is missing.
    ValueError: it cannot be read.
  """
  if not exists(name):
    raise FileNotFoundError(
      f"benchmarks/results/{name}.json is missing; README.md has numbers from"
      " it"
    )
  return atomic.read_json(path(name))


def test_scores(run: dict[str, Any]) -> list[dict[str, Any]]:
  """The evaluations of the test split in the record of a run, best last.

  Raises:
    ValueError: it was not scored on it.
  """
  found = [x for x in run["evaluations"] if x["split"] == "test"]
  if not found:
    raise ValueError(
      f"the record of {run['command']!r} has no score of the test split: run"
      " eval.py and benchmarks.run"
    )
  return sorted(found, key=lambda x: -x["bits_per_dim"])


def test_bits(run: dict[str, Any]) -> float:
  """Bits of the test split with the least minimum context."""
  return min(test_scores(run), key=lambda x: x["min_context"])["bits_per_dim"]


def time_of(run: dict[str, Any]) -> str:
  """The training time of a run, in minutes.

  That of processors, if known: it depends less on what else they did.
  """
  if run.get("processor_seconds") is None:
    return minutes(run["seconds"])
  return f"{minutes(run['processor_seconds'])} of processor time"


def minutes(seconds: float) -> str:
  """A time in whole minutes.

  >>> minutes(40), minutes(119)
  ('1 minute', '2 minutes')
  """
  number = max(1, round(seconds / 60))
  return f"{number:,} minute{'s' * (number != 1)}"


def decimals(unit: str, usual: int = 2) -> int:
  """How many decimals bits are written with: those of bases differ little."""
  return 4 if unit == "bits/base" else usual


def with_deviation(
  mean: dict[str, float | None], digits: int = 2, sign: str = ""
) -> str:
  """A mean over seeds, and its deviation if it has one.

  >>> with_deviation(dict(mean=1.2345, deviation=0.0123), 3, sign="+")
  '+1.234 ± 0.012'
  """
  text = f"{mean['mean']:{sign}z.{digits}f}"  # z: no -0.00
  if mean["deviation"] is None:
    return text
  return f"{text} ± {mean['deviation']:.{digits}f}"
