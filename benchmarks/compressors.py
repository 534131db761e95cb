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
import functools
import lzma
import zlib
from collections.abc import Callable

from benchmarks import record
from sparse_transformer import data

BEST = 9 | lzma.PRESET_EXTREME
# For text, xz's manual recommends to have more bits of literal context, and
# none of position.
TEXT = dict(id=lzma.FILTER_LZMA2, preset=BEST, lc=4, pb=0)
COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
  "gzip -9": functools.partial(zlib.compress, level=9, wbits=31),
  "bzip2 -9": functools.partial(bz2.compress, compresslevel=9),
  "xz -9e": functools.partial(lzma.compress, preset=BEST),
  "xz -9e, lc=4, pb=0": functools.partial(lzma.compress, filters=[TEXT]),
}


def score(source: data.Source) -> dict:
  if not isinstance(source, data.Stream):
    raise ValueError(
      "compressors need a stream of symbols, not images; name a config of text"
    )
  splits = source.load()
  train, validation, test = (splits[name].tobytes() for name in data.SPLITS)
  rest, rows = train + validation, []
  entire = rest + test
  for name, compress in COMPRESSORS.items():
    whole, before, alone = (8 * len(compress(x)) for x in (entire, rest, test))
    rows.append(
      dict(
        compressor=name,
        all=whole / len(entire),
        test_alone=alone / len(test),
        test_given_rest=(whole - before) / len(test),
      )
    )
  return dict(symbols=len(entire), test_symbols=len(test), rows=rows)


if __name__ == "__main__":
  record.main_on_data("compressors", score)
