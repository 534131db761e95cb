"""The parts by name, and what they are asked for.

A part is a module with a function `entries(settings)`, which returns
{name: function(record)}. The function of an entry returns what it found as a
dictionary of JSON values. On the way, it may call `record` with what it has
found so far, which is kept if it does not come to its end.

What an entry found is a failure if it has the key "failed", whose value says
why. One with "skipped" could not run here, and is none.
"""

import dataclasses

# The module of each part, and whether each entry needs a new process, so that
# the peak of the device's memory is the entry's own.
PARTS = {
  "setup": False,
  "correctness": False,
  "determinism": False,
  "resume": False,
  "attention": False,
  "presets": True,
  "train": True,
}


@dataclasses.dataclass(frozen=True)
class Settings:
  """What is asked for.

  Attributes:
    small: whether to use small sizes.
    executors: names of the executors of attention to run; () for all.
    minutes: the most that a part may take.
    data: for `train`: a .npy file of images, or the `data.path` of the config;
      "" for the default place of the data set.
  """

  small: bool = False
  executors: tuple[str, ...] = ()
  minutes: float = 30.0
  data: str = ""

  def on(self, device: dict) -> "Settings":
    """The settings for a device, as `setup` describes it."""
    small = self.small or device["platform"] == "cpu"
    return dataclasses.replace(self, small=small)
