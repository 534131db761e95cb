"""Scores baselines other than networks on the data of a config.

python -m benchmarks.baselines --config=configs/text_small.py \\
  --config.data.path=FILE

Scores are bits per symbol of the validation and test split, given the training
split.

For images, the baselines are: independent positions, each with the distribution
of its values in the training split, where each value is counted once more than
it occurs; `benchmarks.linear`; and, for RGB images and clips, the size of the
split coded as one large mosaic, in which the header is negligible. For clips,
`benchmarks.counts` also scores all frames but the first.
For text, the baselines are compressors. The score is the size of the training
split and the scored split compressed together, minus that of the training split
alone. The models "window alone" do not use the training split: each
`config.data.length` bytes are compressed separately, because this is all that a
network sees of the scored split for a prediction. `benchmarks.matches` scores
counts of the bytes after short contexts in the training split, and a rule that
copies the byte after the last match in the window.
Codecs do not use the training split. Codecs and compressors also learn from the
part of a split that they have already coded; `sees` says how much of it they
can use.

Writes benchmarks/results/baselines_NAME.json, where NAME is config.data.name.
"""

import bz2
import fractions
import functools
import importlib
import lzma
import math
import pathlib
import sys
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from absl import flags

from benchmarks import counts, linear, matches, ngrams, record
from sparse_transformer import cli, data, schema

Splits = Mapping[str, np.ndarray]
OPTIONAL = {"pyppmd": "1.3.1", "imagecodecs": "2026.10.10", "av": "18.1.0"}
BEST = 9 | lzma.PRESET_EXTREME
# The settings that the manual of LZMA recommends for text.
TEXT = dict(id=lzma.FILTER_LZMA2, preset=BEST, lc=4, pb=0)
# Lengths of the longest contexts.
COUNTS = {"counts after a byte": 1, "counts after up to 7 bytes": ngrams.MOST}
COPIES = "copy of the last match, else counts after up to 7 bytes"
MEMORY = 2**28  # bytes; if they were full, PPMd would discard its model


def optional(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError:
    wanted = f"{name}=={OPTIONAL[name]}"
    print(f"baselines that need {name} are omitted: pip install {wanted}")
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
# Compressors without a header, which would increase the size of short texts.
ALONE: dict[str, Callable[[bytes], bytes]] = {
  "LZMA": functools.partial(
    lzma.compress, format=lzma.FORMAT_RAW, filters=[TEXT]
  ),
  "PPMd -o6": COMPRESSORS["PPMd -o6"],
  "PPMd -o16": COMPRESSORS["PPMd -o16"],
}
# Of libpng's filters and strategies, those used here are best on the validation
# split of CIFAR-10. They choose the filter of each row that minimizes the sum
# of absolute differences.
CODECS: dict[str, tuple[str, dict[str, Any]]] = {
  "PNG -9": ("png", dict(level=9, filter="all", strategy="filtered")),
  "WebP -m 6 -q 100": ("webp", dict(level=100, method=6, lossless=True)),
  "JPEG XL -e 9": ("jpegxl", dict(effort=9, lossless=True, usecontainer=False)),
}
VIDEO_CODECS: dict[str, tuple[str, dict[str, str]]] = {
  "FFV1": ("ffv1", dict(level="3", coder="1", context="1")),
  "x264 -qp 0": ("libx264", dict(preset="veryslow", qp="0")),
}
SEES = {
  "gzip": "the last 32 KiB",
  "bzip2": "its block of 900 kB",
  "xz": "the last 64 MiB",
  "PPMd": f"what its model has in {MEMORY >> 20} MiB",
}


def main(argv):
  cli.require("config")
  config = schema.typed(flags.FLAGS.config).data
  path = record.without_folders(config.path)
  content = record.about("python -m benchmarks.baselines", sys.argv[1:])
  content |= dict(data=dict(path=path, fractions=config.fractions))
  content |= score(data.source(config))
  for name in sys.modules.keys() & OPTIONAL:  # the optional packages in use
    content["versions"][name] = sys.modules[name].__version__
  out = flags.FLAGS.out or record.FOLDER / f"baselines_{config.name}.json"
  record.write(pathlib.Path(out), content)


def score(source: data.Source) -> dict[str, Any]:
  if isinstance(source, data.Images):
    splits = {x: np.stack(list(source.examples(x))) for x in data.SPLITS}
    rows = [independent(splits, source.vocab_size)]
    if source.shape[-1] == 3 and optional("imagecodecs"):
      rows += codecs(splits, source.shape)
    if source.frames > 1:
      rows += counts.score(splits, source)
      rows += video_codecs(splits, source) if optional("av") else []
    rows += linear.score(splits, source)
  elif not isinstance(source, data.Stream) or source.unit != "bits/byte":
    about = "data must be images or text, without labels"
    raise ValueError(f"{source.unit}: {about}")
  else:
    splits = source.load()
    has_ppmd = optional("pyppmd") is not None
    rows = compress(splits, has_ppmd)
    rows += compress_windows(splits, source.length, has_ppmd)
    rows += count_bytes(splits, source.length)
  symbols = {x: splits[x].size for x in data.SPLITS}
  return dict(unit=source.unit, symbols=symbols, rows=rows)


def independent(splits: Splits, size: int) -> dict[str, Any]:
  """Returns the score of independent positions with values below `size`."""
  count = functools.partial(np.bincount, minlength=size)
  counts_LV = 1 + np.stack([count(values) for values in splits["train"].T])
  bits_LV = -np.log2(counts_LV / counts_LV.sum(1, keepdims=True))
  bits = lambda found: float(bits_LV[np.arange(len(bits_LV)), found].mean())
  found = {split: bits(splits[split]) for split in linear.SCORED}
  return dict(model="independent positions", sees="nothing") | found


def codecs(splits: Splits, shape: tuple[int, int, int]) -> list[dict[str, Any]]:
  rows = []
  for name, (codec, options) in CODECS.items():
    encode = getattr(sys.modules["imagecodecs"], f"{codec}_encode")
    row = dict(model=f"`{name}`", sees="the mosaic")
    for split in linear.SCORED:
      content = encode(mosaic(splits[split].reshape(-1, *shape)), **options)
      row[split] = 8 * len(content) / splits[split].size
    rows.append(row)
  return rows


def video_codecs(splits: Splits, source: data.Images) -> list[dict[str, Any]]:
  """Scores codecs on a video that shows all clips side by side."""
  rows, (_, side, _) = [], source.shape
  for name, (codec, options) in VIDEO_CODECS.items():
    row: dict[str, Any] = dict(model=f"`{name}`", sees="the mosaic")
    for split in linear.SCORED:
      clips = splits[split].reshape(-1, source.frames, side, side)
      packets = coded(mosaic(clips.transpose(0, 2, 3, 1)), codec, options)
      row[split] = 8 * sum(x.size for x in packets) / clips.size
    rows.append(row)
  return rows


def coded(frames: np.ndarray, codec: str, options: dict[str, str]) -> list[Any]:
  """Returns the packets of a gray video [rows, columns, frames]."""
  av = sys.modules["av"]
  context = av.CodecContext.create(codec, "w")
  context.height, context.width, number = frames.shape
  context.pix_fmt, context.options = "gray", options
  context.time_base = fractions.Fraction(1, number)
  packets: list[Any] = []
  for i in range(number):
    content = np.ascontiguousarray(frames[..., i])
    frame = av.VideoFrame.from_ndarray(content, format="gray")
    frame.pts, frame.time_base = i, context.time_base
    packets += context.encode(frame)
  return packets + context.encode(None)


def mosaic(images: np.ndarray) -> np.ndarray:
  """Arranges images in a square, row by row, filled up with black."""
  number, height, width, channels = images.shape
  side = math.ceil(math.sqrt(number))
  after = (0, side**2 - number), (0, 0), (0, 0), (0, 0)
  square = np.pad(images, after).reshape(side, side, *images.shape[1:])
  return square.swapaxes(1, 2).reshape(side * height, side * width, channels)


def compress(splits: Splits, has_ppmd: bool) -> list[dict[str, Any]]:
  train, *scored = (splits[name].tobytes() for name in data.SPLITS)
  rows = []
  for name, run in COMPRESSORS.items():
    if "PPMd" in name and not has_ppmd:
      continue
    size = lambda content, run=run: 8 * len(run(content))
    given = [(size(train + x) - size(train)) / len(x) for x in scored]
    about = dict(model=f"`{name}`", sees=SEES[name.split()[0]])
    rows.append(about | dict(zip(linear.SCORED, given, strict=True)))
  return rows


def compress_windows(
  splits: Splits, length: int, has_ppmd: bool
) -> list[dict[str, Any]]:
  """Scores compressors on each sequence of a split separately."""
  rows = []
  for name, run in ALONE.items():
    if "PPMd" in name and not has_ppmd:
      continue
    row: dict[str, Any] = dict(
      model=f"`{name}`, window alone", sees="its window"
    )
    for split in linear.SCORED:
      content = splits[split].tobytes()
      starts = range(0, len(content), length)
      sizes = [len(run(content[start : start + length])) for start in starts]
      row[split] = 8 * sum(sizes) / len(content)
    rows.append(row)
  return rows


def count_bytes(splits: Splits, length: int) -> list[dict[str, Any]]:
  """Scores counts of the training split, alone and with copies."""
  train, validation, test = (
    np.frombuffer(splits[x].tobytes(), np.uint8) for x in data.SPLITS
  )
  scored = dict(validation=validation, test=test)
  orders = ngrams.count(ngrams.windows_of(train, length))
  rows = []
  for model, most in COUNTS.items():
    bits = {
      split: ngrams.bits(orders[: most + 1], ngrams.windows_of(x, length))
      for split, x in scored.items()
    }
    sees = model.removeprefix("counts after ")
    rows.append(dict(model=model, sees=sees) | bits)

  found = {x: matches.copy_rule(train, scored[x], length) for x in scored}
  bits = {split: x["bits"] for split, x in found.items()}
  shares = {x: found["validation"][x] for x in ("found", "far", "right")}
  rows.append(dict(model=COPIES, sees="its window") | bits)
  rows[-1]["matches"] = shares  # in the validation split
  return rows


if __name__ == "__main__":
  flags.DEFINE_string("out", None, "File to which the record is written.")
  cli.run(main, cli.on_config)
