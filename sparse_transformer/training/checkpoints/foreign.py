"""Readers: modules that read files of weights written by other code.

A reader defines:
  SUFFIX: the suffix of its files.
  matches(text): returns whether `train.init_from=text` names such a file. The
    text may also select which weights of the file to read.
  load(text, config): returns (arrays, provenance) for an experiment with this
    config. `arrays` is a dict of float32 arrays, keyed by their names in our
    network, see `store.by_name`. The provenance describes their origin as JSON.
    It includes `bits`, a score in bits/dim, only if the score was measured on
    the data that the config names.
  preset(text): returns the config of the network in the file.
  with_its_data(config): returns the config with the data splits on which such
    networks were trained.

`load` and `preset` raise OSError if the file cannot be read, and ValueError if
it is damaged or if no config is known for its network.
"""

from types import ModuleType

from sparse_transformer.training.checkpoints import released
from sparse_transformer.training.checkpoints.exported import SUFFIX

# To remove a reader, delete its file, its import and its line here.
READERS: list[ModuleType] = [
  released,
]
# The suffixes of all files that can be read, exported or foreign.
SUFFIXES = " or ".join([SUFFIX, *(x.SUFFIX for x in READERS)])


def reader(text: str) -> ModuleType | None:
  """Returns the reader of the file named by `text`, or None."""
  return next((x for x in READERS if x.matches(text)), None)
