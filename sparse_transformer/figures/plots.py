"""Pictures: attention patterns, and samples beside real data."""

import textwrap

import matplotlib
import numpy as np

MAX_LENGTH = 4096  # positions of a matrix that is drawn
MAX_CELLS = 256  # on a side of what is drawn: more is finer than the pixels
MAX_PANELS = 12  # patterns in one picture
KEY, QUERY = 1, 2
# Of nothing, a key, the query.
COLORS = (0xFF, 0xFF, 0xFF), (0x8F, 0xB8, 0xDE), (0x1B, 0x3A, 0x5C)
PALEST = 0.5  # how much color a key keeps among many cells without


def save_patterns(path, layers, shape, length, chosen=None):
  """Draws the distinct patterns of a network, as Figure 3 of the paper.

  Above, what one query sees in the geometry of the data, a byte a cell;
  below, the pattern as a matrix, rows are queries. The picture holds at most
  12 patterns, and of a matrix the first 4,096 positions.

  layers: tuple (layers) of tuples (heads). shape: the geometry of the data.
  chosen: the patterns to draw, by default all.
  """
  found = places(layers)
  chosen = list(found if chosen is None else chosen)
  drawn = chosen[:MAX_PANELS]
  titles = [
    f"{textwrap.fill(str(p), 42)}\n{describe_places(*found[p])}" for p in drawn
  ]
  more = len(chosen) - len(drawn)
  note = f"and {more:,} more" if more else ""
  draw(path, titles, drawn, shape, length, note)


def places(layers):
  """Where each distinct pattern is: {pattern: (layers, heads)}, sorted."""
  found = {}
  for layer, heads in enumerate(layers):
    for head, pattern in enumerate(heads):
      at = found.setdefault(pattern, (set(), set()))
      at[0].add(layer)
      at[1].add(head)
  return {p: (sorted(at[0]), sorted(at[1])) for p, at in found.items()}


def describe_places(layers, heads):
  """'layers 0, 2, 4, 6 ..., head 0'."""
  return f"{_some('layer', layers)}, {_some('head', heads)}"


def draw(path, titles, patterns, shape, length, note=""):
  matplotlib.use("Agg")  # files only: no display is asked for
  from matplotlib import pyplot as plt

  figure, axes = plt.subplots(
    2, len(patterns), figsize=(3.2 * len(patterns), 6.6), squeeze=False
  )
  for (top, bottom), title, pattern in zip(
    axes.T, titles, patterns, strict=True
  ):
    top.set_title(title, fontsize=9)
    cells = _row(pattern, length, shape[0])
    image = _paint(cells, *(-(-size // MAX_CELLS) for size in cells.shape))
    top.imshow(image, aspect="auto", interpolation="nearest")
    matrix = _matrix(pattern, min(length, MAX_LENGTH))
    bottom.imshow(matrix, interpolation="nearest")
    if length > MAX_LENGTH:
      bottom.set_xlabel(f"the first {MAX_LENGTH:,} of {length:,}", fontsize=8)
    for axis in (top, bottom):
      axis.set(xticks=[], yticks=[])
  if note:
    figure.suptitle(note, fontsize=9)
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def _row(pattern, length, rows):
  """What a query past the middle sees, in `rows` rows of the data."""
  query = min(length - 1, int(length * 0.71))
  cells = np.zeros(rows * -(-length // rows), np.uint8)
  cells[pattern.keys(query, length)] = KEY
  cells[query] = QUERY
  return cells.reshape(rows, -1)


def _matrix(pattern, n):
  """The pairs of the first n positions, painted a strip of rows at a time."""
  i, size = np.arange(n, dtype=np.int32), -(-n // MAX_CELLS)
  strips = []
  for start in range(0, n, size):
    q = i[start : start + size, None]
    cells = np.where(pattern.mask(q, i), KEY, 0)
    strips.append(_paint(np.where(q == i, QUERY, cells), size, size))
  return np.concatenate(strips)


def _paint(cells, height, width):
  """RGB of cells, `height` x `width` of them joined to one.

  It is the paler the fewer of them are keys; a query stays what it is.
  """
  share = _pool(cells > 0, height, width)[..., None]
  shade = np.where(share > 0, PALEST + (1 - PALEST) * share, 0)
  nothing, key, query = np.array(COLORS)
  painted = nothing + (key - nothing) * shade
  has_query = _pool(cells == QUERY, height, width)[..., None] > 0
  return np.where(has_query, query, painted).round().astype(np.uint8)


def _pool(cells, *sizes):
  """Means over blocks of the given sizes; those at the end may be smaller."""
  for axis, size in enumerate(sizes):
    starts = np.arange(0, cells.shape[axis], size)
    lengths = np.diff(starts, append=cells.shape[axis])
    sums = np.add.reduceat(cells, starts, axis=axis, dtype=float)
    cells = sums / np.expand_dims(lengths, 1 - axis)
  return cells


def _some(noun, numbers):
  """'layers 0, 2, 4 ...' from sorted numbers."""
  more = " ..." if len(numbers) > 4 else ""
  plural = "s" if len(numbers) > 1 else ""
  return f"{noun}{plural} {', '.join(map(str, numbers[:4]))}{more}"


def curves(runs, unit):
  """A figure of bits by step: training thin, validation thick.

  runs: {name: lines of metrics.jsonl}.
  """
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  figure, axis = plt.subplots(figsize=(7, 4))
  for i, (name, lines) in enumerate(runs.items()):
    for split, style in (
      ("train", dict(lw=0.8, alpha=0.6)),
      ("validation", dict(lw=2, marker=".")),
    ):
      points = [
        (line["step"], line["bits_per_dim"])
        for line in lines
        if line["split"] == split
      ]
      if points:
        label = f"{name} {split}".strip()
        axis.plot(
          *zip(*points, strict=True), color=f"C{i}", label=label, **style
        )
  axis.set(xlabel="step", ylabel=unit)
  axis.legend(frameon=False, fontsize=8)
  figure.tight_layout()
  return figure


def throughput(lines):
  """A figure of tokens per second by step."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  points = [
    (line["step"], line["tokens_per_second"])
    for line in lines
    if "tokens_per_second" in line
  ]
  figure, axis = plt.subplots(figsize=(7, 2.4))
  axis.plot(*zip(*points, strict=True), color=_hex(COLORS[QUERY]), lw=1)
  axis.set(xlabel="step", ylabel="tokens per second", ylim=(0, None))
  figure.tight_layout()
  return figure


def save_positions(path, bits_L, result):
  """Draws mean bits over the place in the window, and smoothed: the use of
  context. result: what `eval.py` prints."""
  matplotlib.use("Agg")
  from matplotlib import pyplot as plt

  place_L = 1 + np.arange(len(bits_L))
  real = ~np.isnan(bits_L)
  figure, axis = plt.subplots(figsize=(7, 3.6))
  axis.plot(place_L[real], bits_L[real], ".", ms=2, color=_hex(COLORS[KEY]))
  width = max(1, len(bits_L) // 64)
  means = _pool_known(bits_L, width)
  axis.plot(
    np.arange(len(means)) * width + (1 + width) / 2,
    means,
    color=_hex(COLORS[QUERY]),
  )
  axis.axhline(result["bits_per_dim"], color="gray", lw=0.8, ls="--")
  title = "{split}, step {step}, min_context {min_context}: {bits_per_dim:.4f}"
  axis.set_title(title.format(**result), fontsize=10)
  axis.set(xscale="log", xlabel="position in window", ylabel=result["unit"])
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def _pool_known(values, size):
  """Means over blocks of `size`, of what is known; nan where nothing is."""
  starts = np.arange(0, len(values), size)
  known = ~np.isnan(values)
  sums = np.add.reduceat(np.where(known, values, 0), starts)
  counts = np.add.reduceat(known, starts, dtype=int)
  return np.where(counts, sums / np.maximum(counts, 1), np.nan)


def _hex(color):
  return "#{:02x}{:02x}{:02x}".format(*color)


def save_images(path, samples, real, shape, vocab_size):
  """A sheet of sampled images, left, beside real ones, right.

  samples, real: uint8 [images, positions] of the geometry `shape`.
  """
  from PIL import Image

  sheets = [_sheet(tokens, shape, vocab_size) for tokens in (samples, real)]
  gap = np.full((sheets[0].shape[0], shape[1] // 2, 3), 255, np.uint8)
  sheet = np.concatenate([sheets[0], gap, sheets[1]], axis=1)
  scale = max(1, 960 // sheet.shape[1])
  Image.fromarray(sheet.repeat(scale, 0).repeat(scale, 1)).save(path)


def _sheet(tokens, shape, vocab_size):
  """Images in a square, RGB, a white line between them."""
  side = int(np.ceil(np.sqrt(len(tokens))))
  rows, columns, channels = shape
  images = tokens.reshape(-1, *shape).astype(float) * 255 / (vocab_size - 1)
  images = np.broadcast_to(images, (len(tokens), rows, columns, 3))
  padding = ((0, side**2 - len(tokens)), (0, 1), (0, 1), (0, 0))
  cells = np.pad(images, padding, constant_values=255)
  cells = cells.reshape(side, side, rows + 1, columns + 1, 3).swapaxes(1, 2)
  return cells.reshape(side * (rows + 1), -1, 3).round().astype(np.uint8)
