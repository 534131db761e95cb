"""Downloads a data set and writes it where its source looks for it.

python -m sparse_transformer.data prepare cifar10|enwik8 [--data_dir=DIR]
"""

from absl import flags

from sparse_transformer import cli
from sparse_transformer.data import tfds


def main(argv):
  if len(argv) != 3 or argv[1] != "prepare":
    raise ValueError(f"usage: {tfds.COMMAND} cifar10|enwik8 [--data_dir=DIR]")
  builder = tfds.prepare(argv[2], flags.FLAGS.data_dir)
  splits = builder.info.splits
  sizes = ", ".join(f"{splits[k].num_examples} {k}" for k in splits)
  print(f"{builder.name} is in {builder.data_path}: {sizes} records")


if __name__ == "__main__":
  flags.DEFINE_string("data_dir", "", "Folder of tensorflow-datasets.")
  cli.run(main)
