"""Records of results, in benchmarks/results: JSON that says how each was made.

A record is an object with the result and what `about` gives, or a list of
measurements that each say what they are of. `benchmarks.readme` reads them.
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
  """How a record was made: by a program ("python train.py") with arguments."""
  return dict(
    command=without_folders(f"{program} {shlex.join(argv)}".strip()),
    machine=machine.machine(),
    commit=version.commit(),
    versions=version.packages(),
  )


def without_folders(command: str) -> str:
  """A command, or a path, with the names only of absolute paths."""
  return re.sub(r"(^|[\s=,'])/[^\s,']*/", r"\1", command)


def write(path: pathlib.Path, content: Any) -> None:
  """Writes a record, and creates its folder if needed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic.write_json(path, content, indent=1)


def slug(name: str) -> str:
  """A name in lowercase letters, digits and hyphens.

  >>> slug("NVIDIA H100 80GB HBM3")
  'nvidia-h100-80gb-hbm3'
  """
  return "-".join(re.findall("[a-z0-9]+", name.lower()))


def path(name: str) -> pathlib.Path:
  return FOLDER / f"{name}.json"


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


def parser(description: str) -> argparse.ArgumentParser:
  """A parser of flags, with --out, for a command with this docstring."""
  made = argparse.ArgumentParser(
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  made.add_argument("--out", type=pathlib.Path, help="JSON file to write")
  return made
