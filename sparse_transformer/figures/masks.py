"""Figures of attention patterns, like Figure 3 of Child et al. 2019."""

import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparse_transformer.figures import style
from sparse_transformer.patterns import Pattern

# The maximum number of positions of a matrix that are drawn.
MAX_LENGTH = 4096
# The maximum number of cells on a side of an image. More would not be visible.
MAX_CELLS = 256
# The maximum number of cells on a side that are separated by lines.
MAX_OUTLINED = 32
# The maximum number of patterns in one figure.
MAX_PANELS = 12
ALL_QUERIES = "of all queries,\none per row"
# The side of a panel, in inches.
PANEL = 2.4
# The number of characters of a title that fit on a line above a panel.
LINE = 28
# The maximum number of lines in the title of a pattern.
MAX_LINES = 8
# Values of a cell. 0 means not attended to; MAYBE means that it depends on the
# content.
KEY = 1
QUERY = 2
MAYBE = 3
# The smallest fraction of its color that a pixel with any key gets.
PALEST = 0.5

# The heads of each layer.
Layers = Sequence[Sequence[Pattern]]


def save_patterns(
  path: str | os.PathLike, layers: Layers, shape: Sequence[int], length: int
) -> None:
  """Draws the first 12 distinct patterns of a network, as `panels` does.

  The title of each pattern lists the layers and heads that use it.

  Args:
    path: path of the PNG file to write.
    layers: the heads of each layer.
    shape: shape of the data, (rows, columns, ...).
    length: length of a sequence.
  """
  # Patterns are compared by value, so heads with equal patterns share a panel.
  layers_of: dict[Pattern, set[int]] = {}
  heads_of: dict[Pattern, set[int]] = {}
  for layer, heads in enumerate(layers):
    for head, pattern in enumerate(heads):
      layers_of.setdefault(pattern, set()).add(layer)
      heads_of.setdefault(pattern, set()).add(head)

  drawn = list(layers_of)[:MAX_PANELS]
  titles = []
  for pattern in drawn:
    in_layers = first_few(layers_of[pattern], len(layers))
    as_heads = first_few(heads_of[pattern], len(layers[0]))
    titles.append(f"{pattern}\nlayers: {in_layers}; heads: {as_heads}")

  left = len(layers_of) - len(drawn)
  note = f"and {left:,} more" if left else ""
  style.save(panels(titles, drawn, shape, length, note), path)


def first_few(numbers: Iterable[int], size: int) -> str:
  """Lists the four smallest numbers as text, or "all" if there are `size`.

  >>> first_few(range(0, 128, 4), 128), first_few(range(9), 9)
  ('0, 4, 8, 12 ...', 'all')
  """
  numbers = sorted(numbers)
  if len(numbers) == size:
    return "all"
  few = ", ".join(map(str, numbers[:4]))
  return f"{few} ..." if len(numbers) > 4 else few


def panels(
  titles: Sequence[str],
  patterns: Sequence[Pattern],
  shape: Sequence[int],
  length: int,
  note: str = "",
) -> "style.Figure":
  """Returns a figure with a column for each pattern.

  The upper panel shows the keys of one query at their positions in the data,
  which are laid out row by row. The lower panel shows the pattern as a matrix
  of queries (rows) and keys (columns), up to position 4,096.

  Args:
    titles: titles of the columns.
    patterns: one pattern for each title.
    shape: shape of the data. The product of its sizes is at least the length.
    length: length of a sequence.
    note: text above all columns; "" for none.

  Raises:
    ValueError: a pattern does not fit the length.
  """
  for pattern in patterns:
    pattern.check(length)

  labels = "keys of one query,\nby position", ALL_QUERIES
  figure, axes = columns(titles, labels, note)
  for (top, bottom), pattern in zip(axes.T, patterns, strict=True):
    show(top, image_of_query(pattern, length, shape), aspect="auto")
    show(bottom, image_of_matrix(pattern, min(length, MAX_LENGTH)))
    notes = []
    if pattern.contents():
      notes.append("yellow: depends on the content")
    if length > MAX_LENGTH:
      notes.append(f"the first {MAX_LENGTH:,} of {length:,}")
    bottom.set_xlabel("\n".join(notes))
  return figure


def columns(
  titles: Sequence[str], labels: Sequence[str], above: str
) -> "tuple[style.Figure, np.ndarray]":
  """Makes a figure with two panels below each title.

  Args:
    titles: titles of the columns; long ones are wrapped.
    labels: labels of the upper and the lower row.
    above: text above all columns; "" for none.

  Returns:
    The figure and its axes [2, titles].
  """
  wrapped = [_wrapped(title) for title in titles]
  # The figure grows with the number of lines in titles, so that panels keep
  # their size.
  lines = max(title.count("\n") for title in wrapped)
  height = 2 * PANEL + 0.2 * (1 + lines)
  height += 0.25 * len(above.splitlines())
  number = len(titles)
  # Text above the columns needs the width of two panels.
  width = PANEL * max(number, 2 if above else 1)

  figure, axes = style.subplots(2, number, width, height)
  for axis, title in zip(axes[0], wrapped, strict=True):
    axis.set_title(title, fontsize="medium", color=style.DARK)
  for axis, label in zip(axes[:, 0], labels, strict=True):
    axis.set_ylabel(label, color=style.GRAY)
  if above:
    figure.suptitle(above, fontsize="medium")
  return figure, axes


def _wrapped(title):
  """Wraps a title, but not within parentheses that fit on a line."""

  # Non-breaking spaces keep text such as Strided(128, first=0) on one line.
  def whole(term):
    return term[0].replace(" ", "\xa0" if len(term[0]) <= LINE else " ")

  wrap = textwrap.TextWrapper(LINE, max_lines=MAX_LINES, placeholder=" ...")
  lines = re.sub(r"\w*\([^()]*\)", whole, title).splitlines()
  return "\n".join(map(wrap.fill, lines))


def show(axis: Any, image: np.ndarray, aspect: str = "equal") -> None:
  """Shows an image in a panel, with outlined cells if they are few.

  Args:
    axis: axes of Matplotlib.
    image: RGB, [rows, columns, 3].
    aspect: "equal" for square cells, "auto" to fill the panel.
  """
  axis.imshow(image, aspect=aspect, interpolation="nearest")
  axis.set(xticks=[], yticks=[])
  axis.spines[:].set_color(style.GRID)

  # If there are more cells, lines between them would hide them.
  rows, columns = image.shape[:2]
  if max(rows, columns) > MAX_OUTLINED:
    return

  _separate(axis.hlines, rows, columns)
  _separate(axis.vlines, columns, rows)


def _separate(draw, number, length):
  """Draws lines between cells.

  Args:
    draw: `axis.hlines` or `axis.vlines`.
    number: number of cells that the lines separate.
    length: length of the lines, in cells.
  """
  between = np.arange(0.5, number - 1)
  draw(
    between,
    -0.5,
    length - 0.5,
    color=style.GRID,
    lw=0.5,
  )


def shown_query(n: int) -> int:
  """Returns the query, out of n, whose keys the upper panel shows."""
  # The query is in the lower half, where it has many keys, and is not at a
  # multiple of most strides.
  return min(n - 1, int(n * 0.71))


def cell_size(n: int) -> int:
  """Returns how many of n positions along an axis a pixel combines."""
  return -(-n // MAX_CELLS)


def image_of_query(
  pattern: Pattern, length: int, shape: Sequence[int]
) -> np.ndarray:
  """Returns an RGB image of the keys of one query, see `shown_query`.

  Args:
    pattern: the pattern.
    length: length of a sequence.
    shape: shape of the data, (rows, columns, ...), in which positions are laid
      out row by row.
  """
  query = shown_query(length)
  # The data may have more positions than the sequence. These stay empty.
  cells = np.zeros(np.prod(shape), np.uint8)
  cells[:length] = _cells(pattern, query, np.arange(length))
  cells[query] = QUERY
  in_data = cells.reshape(shape[0], -1)
  rows, columns = in_data.shape
  return paint(in_data, cell_size(rows), cell_size(columns))


def image_of_matrix(pattern: Pattern, n: int) -> np.ndarray:
  """Returns an RGB image of the pairs among the first n positions.

  The image is painted in strips of queries, so that no n x n array is needed.
  """
  keys = np.arange(n, dtype=np.int32)
  size = cell_size(n)

  strips = []
  for start in range(0, n, size):
    queries = keys[start : start + size, None]
    cells = _cells(pattern, queries, keys)
    # Mark the diagonal, where a query is its own key.
    cells = np.where(queries == keys, QUERY, cells)
    strips.append(paint(cells, size, size))
  return np.concatenate(strips)


def _cells(pattern, q, k):
  """Returns the values of pairs: KEY, MAYBE or 0.

  Args:
    pattern: the pattern.
    q: positions of queries, integers.
    k: positions of keys, integers; `q` and `k` are broadcast against each
      other.
  """
  if not pattern.contents():
    return np.where(pattern.mask(q, k), KEY, 0)
  # Pairs that may exist for some content are MAYBE, and pairs that exist for
  # any content are KEY.
  cells = np.where(pattern.support().mask(q, k), MAYBE, 0)
  return np.where(pattern.static_part().mask(q, k), KEY, cells)


def paint(cells: np.ndarray, height: int, width: int) -> np.ndarray:
  """Returns an RGB image. Each pixel combines `height` x `width` cells.

  A pixel is paler if fewer of its cells are keys. If any of its cells is a
  query, the pixel shows the query instead.

  Args:
    cells: [rows, columns], with values 0, `KEY`, `QUERY` and `MAYBE`.
    height: height of a pixel, in cells.
    width: width of a pixel, in cells.

  Returns:
    uint8 [pixels, pixels, 3].
  """
  is_query = cells == QUERY
  keys = pool(cells == KEY, height, width)
  maybe = pool(cells == MAYBE, height, width)
  queries = pool(is_query, height, width)

  # Even a single key in a pixel remains visible.
  shade = PALEST + (1 - PALEST) * keys
  shade[keys == 0] = 0
  white = style.rgb("#ffffff")
  to_blue = style.rgb(style.LIGHT) - white
  image = white + to_blue * shade[..., None]
  # Later colors replace earlier ones, so a query replaces yellow and blue.
  # Yellow is used only in pixels without keys.
  maybe[keys > 0] = 0
  image[maybe > 0] = style.rgb(style.PALE)
  image[queries > 0] = style.rgb(style.DARK)
  return image.round().astype(np.uint8)


def pool(cells: np.ndarray, *sizes: int) -> np.ndarray:
  """Computes means over blocks of cells. The last block may be smaller.

  Args:
    cells: [rows, columns], numbers or booleans.
    *sizes: height and width of a block.

  Returns:
    Floats [blocks, blocks], between 0 and 1 for booleans.
  """
  for axis, size in enumerate(sizes):
    starts = np.arange(0, cells.shape[axis], size)
    # The last block may be cut off.
    lengths = np.diff(starts, append=cells.shape[axis])
    sums = np.add.reduceat(cells, starts, axis=axis, dtype=float)
    cells = sums / np.expand_dims(lengths, 1 - axis)
  return cells
