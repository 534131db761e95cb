"""Scores general-purpose compressors on the test split of a config's data.

python -m benchmarks.compressors --config=configs/text_small.py \\
  --config.data.path=FILE

A baseline for models of text, in bits per symbol: of all data; of the test
split compressed on its own; and of the test split given what is before it, as
the size of all data minus the size of all data but the test split. The last is
what a model that was trained on the training split compares with. Writes
benchmarks/results/compressors.json.
"""

import bz2
import lzma
import pathlib
import sys
import zlib
from collections.abc import Callable, Sequence

from absl import flags

from benchmarks import record
from sparse_transformer import cli, data

# For text, xz's manual recommends to have more bits of literal context, and
# none of position.
TEXT = dict(id=lzma.FILTER_LZMA2, preset=9 | lzma.PRESET_EXTREME, lc=4, pb=0)
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
  "gzip -9": lambda content: zlib.compress(content, 9, wbits=31),
  "bzip2 -9": lambda content: bz2.compress(content, 9),
  "xz -9e": lambda content: lzma.compress(
    content, preset=9 | lzma.PRESET_EXTREME
  ),
  "xz -9e, lc=4, pb=0": lambda content: lzma.compress(content, filters=[TEXT]),
}


def main(argv: Sequence[str]) -> None:
  cli.check_arguments(argv)
  cli.require("config")
  args = flags.FLAGS
  rest, test, unit = parts(data.source(args.config.data))
  rows = [
    dict(compressor=name, **score(compress, rest, test))
    for name, compress in COMPRESSORS.items()
  ]
  content = record.about("python -m benchmarks.compressors", sys.argv[1:])
  content |= dict(unit=unit, symbols=len(rest) + len(test))
  content |= dict(test_symbols=len(test), rows=rows)
  record.write(pathlib.Path(args.out), content)


def parts(source: data.Source) -> tuple[bytes, bytes, str]:
  """The symbols before the test split, its symbols, and the unit of bits.

  Raises:
    ValueError: if the data are images, not a stream of symbols.
  """
  if not isinstance(source, data.Stream):
    raise ValueError(
      "compressors need a stream of symbols, not images; name a config of text"
    )
  splits = source.load()
  train, validation, test = (splits[name].tobytes() for name in data.SPLITS)
  return train + validation, test, source.unit


def score(
  compress: Callable[[bytes], bytes], rest: bytes, test: bytes
) -> dict[str, float]:
  """Bits per symbol: of all data, of `test` alone, of `test` given `rest`."""
  sizes = [len(compress(x)) for x in (rest + test, rest, test)]
  whole, before, alone = (8 * size for size in sizes)
  return dict(
    all=whole / len(rest + test),
    test_alone=alone / len(test),
    test_given_rest=(whole - before) / len(test),
  )


if __name__ == "__main__":
  flags.DEFINE_string(
    "out", str(record.FOLDER / "compressors.json"), "File of the record."
  )
  cli.run_on_config(main)
