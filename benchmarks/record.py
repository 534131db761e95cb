"""Records of results: JSON in benchmarks/results that describes its origin.

A record is either an object that contains a result and the fields of `about`,
or a list of measurements that describe themselves. `benchmarks.readme` reads
the records.
"""

import argparse
import pathlib
import re
import shlex
from collections.abc import Sequence
from typing import Any

from sparse_transformer import atomic, machine, version

REPO = pathlib.Path(__file__).resolve().parents[1]
FOLDER = REPO / "benchmarks" / "results"


def about(program: str, argv: Sequence[str]) -> dict[str, Any]:
  """Returns how a record was made: by a command such as "python train.py".

  Args:
    program: the start of the command.
    argv: its arguments.
  """
  return dict(
    command=without_folders(f"{program} {shlex.join(argv)}".strip()),
    machine=machine.machine(),
    commit=version.commit(),
    versions=version.packages(),
  )


def without_folders(command: str) -> str:
  """Replaces absolute paths in a command by the names of their files."""
  return re.sub(r"(^|[\s=,'])/[^\s,']*/", r"\1", command)


def write(path: pathlib.Path, content: Any) -> None:
  """Writes a record, and creates its folder if necessary."""
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, content, indent=1)


def slug(name: str) -> str:
  """Converts a name to lowercase letters, digits and hyphens.

  >>> slug("NVIDIA H100 80GB HBM3")
  'nvidia-h100-80gb-hbm3'
  """
  return "-".join(re.findall("[a-z0-9]+", name.lower()))


def path(name: str) -> pathlib.Path:
  return FOLDER / f"{name}.json"


def read(name: str) -> Any:
  if not path(name).exists():
    raise FileNotFoundError(
      f"benchmarks/results/{name}.json is missing, but pages show its numbers;"
      " restore it or measure it again"
    )
  return atomic.read_json(path(name))


def test_scores(run: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns the evaluations of the test split, sorted by minimum context."""
  found = [x for x in run["evaluations"] if x["split"] == "test"]
  if not found:
    raise ValueError(
      f"the record of {run['command']!r} has no score of the test split; run"
      " eval.py, and then benchmarks.run"
    )
  return sorted(found, key=lambda x: x["min_context"])


def parser(description: str) -> argparse.ArgumentParser:
  """Returns a parser of flags, including --out, with a description."""
  made = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  made.add_argument("--out", type=pathlib.Path, help="JSON file to write")
  return made
