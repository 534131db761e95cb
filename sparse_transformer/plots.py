"""Pictures: attention patterns, and samples beside real data.

python -m sparse_transformer.plots docs/patterns.png draws the README's.
"""

import functools

import matplotlib
import numpy as np

from sparse_transformer import command, patterns as patterns_lib

MAX_ROWS = 384  # of a matrix that is drawn: more is finer than the pixels
KEY, QUERY = 1, 2
COLORS = "white", "#8fb8de", "#1b3a5c"  # nothing, key, query


def save_patterns(path, layers, shape, length):
  """Draws every distinct pattern of a network, as Figure 3 of the paper.

  Above, what one query sees in the geometry of the data, a byte a cell;
  below, the pattern as a matrix, rows are queries.

  layers: tuple (layers) of tuples (heads). shape: the geometry of the data.
  """
  drawn = {}
  for layer, heads in enumerate(layers):
    for head, pattern in enumerate(heads):
      places = drawn.setdefault(pattern, (set(), set()))
      places[0].add(layer)
      places[1].add(head)
  titles = [
    f"{_label(pattern)}\n{_some('layer', at[0])}, {_some('head', at[1])}"
    for pattern, at in drawn.items()
  ]
  _draw(path, titles, list(drawn), shape, length)


def _draw(path, titles, patterns, shape, length):
  matplotlib.use("Agg")  # files only: no display is asked for
  from matplotlib import pyplot as plt
  from matplotlib.colors import ListedColormap

  show = functools.partial(
    plt.Axes.imshow, cmap=ListedColormap(COLORS), vmin=0, vmax=2
  )
  figure, axes = plt.subplots(
    2, len(patterns), figsize=(3.2 * len(patterns), 6.6), squeeze=False
  )
  rows = shape[0]
  for (top, bottom), title, pattern in zip(
    axes.T, titles, patterns, strict=True
  ):
    top.set_title(title, fontsize=9)
    cells = _row(pattern, length, rows)
    show(top, cells, aspect="auto", interpolation="nearest")
    show(bottom, _matrix(pattern, min(length, MAX_ROWS)))
    for axis in (top, bottom):
      axis.set(xticks=[], yticks=[])
  figure.tight_layout()
  figure.savefig(path, dpi=100)
  plt.close(figure)


def _row(pattern, length, rows):
  """What a query past the middle sees, in `rows` rows of the data."""
  query = min(length - 1, int(length * 0.71))
  cells = np.zeros(rows * -(-length // rows), int)
  cells[pattern.keys(query, length)] = KEY
  cells[query] = QUERY
  return cells.reshape(rows, -1)


def _matrix(pattern, n):
  cells = np.where(pattern.matrix(n), KEY, 0)
  np.fill_diagonal(cells, QUERY)
  return cells


def _label(pattern):
  """A pattern's name, in algebra where it is a combination."""
  match pattern:
    case patterns_lib.Union(left, right):
      return f"{_label(left)} | {_label(right)}"
    case patterns_lib.Intersection(left, right):
      return f"{_label(left)} & {_label(right)}"
    case patterns_lib.Difference(left, right):
      return f"{_label(left)} - {_label(right)}"
  return str(pattern)


def _some(noun, numbers):
  """'layers 0, 2, 4 ...' from a set of numbers."""
  numbers = sorted(numbers)
  more = " ..." if len(numbers) > 4 else ""
  plural = "s" if len(numbers) > 1 else ""
  return f"{noun}{plural} {', '.join(map(str, numbers[:4]))}{more}"


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


def main(argv):
  """Draws the named factorizations, merged, at a size one can see."""
  if len(argv) != 2:
    raise ValueError("give one argument: the PNG file to write")
  settings = dict(stride=12, window=12, width=3, num_summaries=1)
  names = patterns_lib.FACTORIZATIONS
  patterns = [
    patterns_lib.assign(name, "merged", num_layers=1, num_heads=1, **settings)
    for name in names
  ]
  _draw(argv[1], names, [p[0][0] for p in patterns], (12, 12), 144)


if __name__ == "__main__":
  command.run(main)
