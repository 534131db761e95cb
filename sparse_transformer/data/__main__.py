"""Downloads a data set and writes it where its source looks for it.

python -m sparse_transformer.data prepare NAME [--data_dir=DIR]
"""

from collections.abc import Sequence

from sparse_transformer import cli
from sparse_transformer.cli import flags
from sparse_transformer.data import download, registered


def main(argv: Sequence[str]) -> None:
  if len(argv) != 3 or argv[1] != "prepare":
    names = "|".join(registered.BUILDERS)
    raise ValueError(f"usage: {registered.PREPARE} {names} [--data_dir=DIR]")
  builder = download.prepare(argv[2], flags.FLAGS.data_dir)
  splits = builder.info.splits
  sizes = ", ".join(f"{splits[k].num_examples} {k}" for k in splits)
  print(f"{builder.name} is in {builder.data_path}: {sizes} records")


if __name__ == "__main__":
  flags.DEFINE_string(
    "data_dir", "", "Folder of all data sets; default: ~/tensorflow_datasets."
  )
  cli.run(main, takes_words=True)
