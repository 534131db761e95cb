"""What a bad input is, and the commands that are given one."""

import dataclasses
import re

import runs

from bad_inputs.files import Prepare, copy

DIGITS = runs.REPO / "configs" / "digits.py"
TRAIN, EVAL = "train.py", "eval.py"
SAMPLE, EXPLAIN, COMPARE, REPORT, DATA, FIGURES = (
  f"sparse_transformer/{name}.py"
  for name in (
    "sample",
    "explain",
    "compare",
    "report",
    "data/__main__",
    "figures/__main__",
  )
)
HUGE = "9" * 5000  # more digits than Python converts
LONG = "x" * 5000  # longer than any name of a file


@dataclasses.dataclass(frozen=True)
class Bad:
  """An input that a command must reject.

  Attributes:
    script: the command.
    words: its arguments; files are relative to the current folder.
    message: a regular expression that the error must match.
    prepare: makes files in the current folder, which is empty. It is called
      with the workdir of a run of two steps, which it may copy.
  """

  script: str
  words: tuple[str, ...]
  message: str
  prepare: Prepare | None = None


def names(*parts: str, rule: str = "") -> str:
  """A regular expression for all of these texts, in any order, and a rule."""
  return "".join(f"(?=.*{re.escape(part)})" for part in parts) + f".*{rule}"


def train(*words: str, message: str, prepare: Prepare | None = None) -> Bad:
  words = f"--config={DIGITS}", "--workdir=new", *words
  return Bad(TRAIN, words, message, prepare)


def explain(*words: str, message: str, prepare: Prepare | None = None) -> Bad:
  return Bad(EXPLAIN, (f"--config={DIGITS}", *words), message, prepare)


def on_run(
  script: str, *words: str, message: str, prepare: Prepare | None = None
) -> Bad:
  """A command on a copy of the run, or on the folder that `prepare` makes."""
  return Bad(script, ("--workdir=run", *words), message, prepare or copy)


def compare(*words: str, message: str, prepare: Prepare | None = None) -> Bad:
  words = f"--config={DIGITS}", "--workdir=new", *words
  return Bad(COMPARE, words, message, prepare)
