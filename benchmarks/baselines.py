"""Scores baselines other than networks on the data of a config.

python -m benchmarks.baselines --config=configs/text_small.py \\
  --config.data.path=FILE

In bits per symbol of the validation and test split, given the training split.

Images: every position has the distribution of its values in the training split,
each counted once more than it occurs; linear prediction, see
`benchmarks.linear`; and codecs, if the pixels are RGB: the size of the split as
one square mosaic, so that the header vanishes. A codec is not given the
training split, but also sees what it has coded of the mosaic's other images.
Text: Markov models, see `benchmarks.markov`, and compressors: the size of the
training split and the scored one minus the size of the training split. What a
compressor has coded of a split it also learns from, unlike the other models;
`sees` says what it can use. Codecs and PPMd are left out where their packages
are missing, see `OPTIONAL`.
ListOps: accuracies in place of bits, see `benchmarks.labels`.

Writes benchmarks/results/baselines_NAME.json, where NAME is config.data.name.
"""

import bz2
import functools
import importlib
import lzma
import math
import pathlib
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import flags

from benchmarks import labels, linear, markov, record
from sparse_transformer import cli, data

OPTIONAL = {"pyppmd": "1.3.1", "imagecodecs": "2026.10.10"}


BEST = 9 | lzma.PRESET_EXTREME
# Its manual recommends for text: bits of literal context, none of position.
TEXT = dict(id=lzma.FILTER_LZMA2, preset=BEST, lc=4, pb=0)
MEMORY = 2**28  # bytes; if they were full, PPMd would forget everything


def optional(name: str) -> Any:
  """The package of this name, or None if it is absent."""
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError:
    wanted = f"{name}=={OPTIONAL[name]}"
    print(f"what needs {name} is left out: pip install {wanted}")
    return None


def ppmd(content: bytes, order: int) -> bytes:
  encoder = sys.modules["pyppmd"].Ppmd7Encoder(order, MEMORY)
  return encoder.encode(content) + encoder.flush()


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
  "gzip -9": functools.partial(zlib.compress, level=9, wbits=31),
  "bzip2 -9": functools.partial(bz2.compress, compresslevel=9),
  "xz -9e": functools.partial(lzma.compress, preset=BEST),
  "xz -9e, lc=4, pb=0": functools.partial(lzma.compress, filters=[TEXT]),
  "PPMd -o6": functools.partial(ppmd, order=6),
  "PPMd -o16": functools.partial(ppmd, order=16),
}
# Of libpng's filters and strategies, these are best on the validation split of
# CIFAR-10: a filter for each row, by the least sum of absolute differences.
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
  "PNG -9": ("png", dict(level=9, filter="all", strategy="filtered")),
  "WebP -m 6 -q 100": ("webp", dict(level=100, method=6, lossless=True)),
  "JPEG XL -e 9": ("jpegxl", dict(effort=9, lossless=True, usecontainer=False)),
}
SEES = {
  "gzip": "the last 32 KiB",
  "bzip2": "its block of 900 kB",
  "xz": "the last 64 MiB",
  "PPMd": f"what its model has in {MEMORY >> 20} MiB",
}


def main(argv):
  cli.require("config")
  config = flags.FLAGS.config.data
  path = record.without_folders(config.path or "")
  content = record.about("python -m benchmarks.baselines", sys.argv[1:])
  content |= dict(data=dict(path=path, fractions=config.fractions))
  source = data.source(config)
  if isinstance(source, data.Sequences):
    content["data"]["length"] = config.length
    content |= labels.score(source)
  else:
    content |= score(source)
  for name in sys.modules.keys() & OPTIONAL:  # these were used
    content["versions"][name] = sys.modules[name].__version__
  out = flags.FLAGS.out or record.FOLDER / f"baselines_{config.name}.json"
  record.write(pathlib.Path(out), content)


def score(source: data.Images | data.Stream) -> dict[str, Any]:
  if isinstance(source, data.Images):
    splits = {x: np.stack(list(source.examples(x))) for x in data.SPLITS}
    rows = [independent(splits, source.vocab_size)]
    if source.shape[-1] == 3 and optional("imagecodecs"):
      rows += codecs(splits, source.shape)
    rows += linear.score(splits, source.shape, source.vocab_size)
  elif source.unit != "bits/byte":
    raise ValueError(f"{source.unit}: data must be images or text")
  else:
    splits = source.load()
    rows = compress(splits) + markov.score(splits, source.vocab_size)
  symbols = {x: splits[x].size for x in data.SPLITS}
  return dict(unit=source.unit, symbols=symbols, rows=rows)


def independent(splits: markov.Splits, size: int) -> dict[str, Any]:
  """The score of independent positions, whose values are less than `size`."""
  count = functools.partial(np.bincount, minlength=size)
  counts_LV = 1 + np.stack([count(values) for values in splits["train"].T])
  bits_LV = -np.log2(counts_LV / counts_LV.sum(1, keepdims=True))
  bits = lambda found: float(bits_LV[np.arange(len(bits_LV)), found].mean())
  found = {split: bits(splits[split]) for split in markov.SCORED}
  return dict(model="independent positions", sees="nothing") | found


def codecs(
  splits: markov.Splits, shape: tuple[int, int, int]
) -> list[dict[str, Any]]:
  """The scores of all codecs of images, given no training split."""
  rows = []
  for name, (codec, options) in CODECS.items():
    encode = getattr(sys.modules["imagecodecs"], f"{codec}_encode")
    row = dict(model=f"`{name}`", sees="the mosaic")
    for split in markov.SCORED:
      content = encode(mosaic(splits[split].reshape(-1, *shape)), **options)
      row[split] = 8 * len(content) / splits[split].size
    rows.append(row)
  return rows


def mosaic(images: np.ndarray) -> np.ndarray:
  """The images in a square, row by row, and black after the last."""
  number, height, width, channels = images.shape
  side = math.ceil(math.sqrt(number))
  empty = np.zeros((side**2 - number, *images.shape[1:]), images.dtype)
  square = np.concatenate([images, empty]).reshape(
    side, side, *images.shape[1:]
  )
  return square.swapaxes(1, 2).reshape(side * height, side * width, channels)


def compress(splits: markov.Splits) -> list[dict[str, Any]]:
  train, *scored = (splits[name].tobytes() for name in data.SPLITS)
  rows, has_ppmd = [], optional("pyppmd")
  for name, run in COMPRESSORS.items():
    if "PPMd" in name and not has_ppmd:
      continue
    size = lambda content, run=run: 8 * len(run(content))
    given = [(size(train + x) - size(train)) / len(x) for x in scored]
    about = dict(model=f"`{name}`", sees=SEES[name.split()[0]])
    rows.append(about | dict(zip(markov.SCORED, given, strict=True)))
  return rows


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "File of the record.")
  cli.run(main, cli.on_config)
