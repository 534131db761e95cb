"""Downloads CIFAR-10, and writes it where the data sources find it.

python -m sparse_transformer.data prepare cifar10 [--data_dir=DIR]
"""

from collections.abc import Sequence

from sparse_transformer import cli
from sparse_transformer.cli import flags
from sparse_transformer.data import cifar10


def main(argv: Sequence[str]) -> None:
  """Prepares CIFAR-10, and prints its folder and its number of records."""
  words = list(argv[1:])
  if words != ["prepare", "cifar10"]:
    usage = f"usage: {cifar10.PREPARE} [--data_dir=DIR]"
    raise ValueError(f"cannot run {' '.join(words)!r}; {usage}")

  # This import loads tensorflow-datasets, which takes seconds, so mistakes are
  # reported before it.
  from sparse_transformer.data import download

  builder = download.prepare(flags.FLAGS.data_dir)
  splits = builder.info.splits
  sizes = ", ".join(f"{splits[k].num_examples} {k}" for k in splits)
  print(f"{builder.name} is in {builder.data_path}: {sizes} records")


if __name__ == "__main__":
  flags.DEFINE_string(
    "data_dir",
    "",
    "Folder that contains all data sets; default: ~/tensorflow_datasets.",
  )
  cli.run(main, takes_words=True)
