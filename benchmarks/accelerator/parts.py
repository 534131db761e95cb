"""The parts by name, what they are asked for, and the order of their entries.

A part is a function `entries(settings, rank)`, which returns {name:
function(record)} of one rank, the most valuable first. The function of an entry
returns what it found as a dictionary of JSON values. On the way, it may call
`record` with what it has found so far, which is kept if it does not come to its
end.

What an entry found is a failure if it has the key "failed", whose value says
why. One with "skipped" could not run here, and is none.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

DENSE = "dense causal"  # the program that attention is compared with
RANKS = 3  # all parts' entries of one rank come before those of the next


@dataclasses.dataclass(frozen=True)
class Part:
  """How the entries of a part run."""

  entries: str  # "module.function", which is loaded in the part's process only
  seconds: float = 60  # the most that an entry may take
  # Each entry has a process, so that the peak of memory is the entry's.
  alone: bool = False
  exact: bool = False  # asks for the same bits twice: GPUs need a flag for that


# In the order in which they run.
PARTS = {
  # As `correctness`, so that they share a process.
  "setup": Part("setup.entries", exact=True),
  "correctness": Part("correctness.entries", exact=True),
  "attention": Part("attention.entries"),
  "presets": Part("presets.entries", seconds=240, alone=True),
  "train": Part("train.entries", seconds=7 * 60, alone=True),
  "determinism": Part("training.determinism", seconds=120, exact=True),
  "resume": Part("training.resume", seconds=120, exact=True),
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is asked for."""

  small: bool = False  # whether to use small sizes
  executors: tuple[str, ...] = ()  # those of attention to run; () for all
  minutes: float = 30.0  # the most that all parts, or a process, may take
  data: str = ""  # of `train`: a .npy file of images, or the config's data.path

  def on(self, device: dict) -> "Settings":
    """The settings for a device, as `setup` describes it."""
    small = self.small or device["platform"] == "cpu"
    return dataclasses.replace(self, small=small)


def schedule(
  names: Sequence[str],
) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
  """(parts, ranks) of the processes to run: one for parts of the same kind.

  >>> list(schedule(["setup", "correctness"]))
  [(('setup', 'correctness'), (0, 1, 2))]
  """
  kind = lambda name: (PARTS[name].alone, PARTS[name].exact)
  groups = [tuple(found) for _, found in itertools.groupby(names, kind)]
  turns = itertools.product(range(RANKS), groups)
  for parts, found in itertools.groupby(turns, lambda turn: turn[1]):
    yield parts, tuple(rank for rank, _ in found)
