"""Records of results: JSON that says how each was made, in benchmarks/results.

A record is an object with the result and with `command`, `machine`, `commit`
and `versions`. The README's numbers come from records, see `benchmarks.readme`.
"""

import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from sparse_transformer import atomic, machine, version

REPO = pathlib.Path(__file__).resolve().parents[1]
FOLDER = REPO / "benchmarks" / "results"


def about(program: str, argv: Sequence[str]) -> dict[str, Any]:
  """What a record says about how it was made.

  Args:
    program: how the program was started: "python -m benchmarks.markov".
    argv: its arguments. Of absolute paths, only the names are kept.
  """
  words = [re.sub(r"(^|=)/\S*/", r"\1", word) for word in argv]
  return dict(
    command=" ".join([program, *words]),
    machine=f"{os.cpu_count()} cores of {machine.cpu_name()}",
    commit=version.commit(),
    versions=version.packages(),
  )


def write(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes a record, and creates its folder if needed."""
  path.parent.mkdir(parents=True, exist_ok=True)
  atomic.write_text(path, json.dumps(content, indent=1) + "\n")
