"""Readers: modules that read files of weights from other code.

A reader has:
  SUFFIX: of its files.
  matches(text): whether `train.init_from=text` names such a file. The text may
    also say which weights of the file.
  load(text, config): (arrays, provenance), for an experiment with this config.
    The arrays are float32, by their names in our network, see `store.by_name`.
    The provenance says as JSON where they are from. Its `bits`, a score in
    bits/dim, is there only if it is of the data that the config names.
  preset(text): the config of the network in the file.
  with_its_data(config): the same config, with the splits of data that such
    files were trained on.

`load` and `preset` raise OSError if the file cannot be read, and ValueError if
it is damaged, or if no config is known for its network.
"""

from types import ModuleType

from sparse_transformer.training.checkpoints import released
from sparse_transformer.training.checkpoints.exported import SUFFIX

# To take one out, delete its file, its import and its line here.
READERS: list[ModuleType] = [
  released,
]
# Those of all files that can be read: of export, or with a reader.
SUFFIXES = " or ".join([SUFFIX, *(x.SUFFIX for x in READERS)])


def reader(text: str) -> ModuleType | None:
  """Returns the reader of the file that a text names, or None."""
  return next((x for x in READERS if x.matches(text)), None)
