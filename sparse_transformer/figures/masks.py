"""Pictures of attention patterns, like Figure 3 of Child et al. 2019."""

import functools
import os
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sparse_transformer.figures import style
from sparse_transformer.patterns import Pattern

MAX_LENGTH = 4096  # positions of a matrix that are drawn
MAX_CELLS = 256  # cells on a side of an image: more would not be visible
MAX_OUTLINED = 32  # cells on a side that are separated by lines
MAX_PANELS = 12  # patterns in one picture
ALL_QUERIES = "of all queries,\none per row"
PANEL = 2.4  # side of a panel in inches
LINE = 28  # characters of a title that fit on a line above a panel
MAX_LINES = 8  # of them for one pattern
# Values of a cell; 0: not attended to; MAYBE: that depends on the content.
KEY, QUERY, MAYBE = 1, 2, 3
PALEST = 0.5  # fraction of its color that a lone key keeps among joined cells

Layers = Sequence[Sequence[Pattern]]  # the heads of each layer


def save_patterns(
  path: str | os.PathLike, layers: Layers, shape: Sequence[int], length: int
) -> None:
  """Draws the first 12 patterns of a network as `panels`."""
  places: dict[Pattern, tuple[set[int], set[int]]] = {}
  for layer, heads in enumerate(layers):
    for head, pattern in enumerate(heads):
      in_layers, as_heads = places.setdefault(pattern, (set(), set()))
      in_layers.add(layer)
      as_heads.add(head)
  drawn = list(places)[:MAX_PANELS]
  sizes = len(layers), len(layers[0])
  titles = [
    "{}\nlayers: {}; heads: {}".format(p, *map(first_few, places[p], sizes))
    for p in drawn
  ]
  note = f"and {more:,} more" if (more := len(places) - len(drawn)) else ""
  style.save(panels(titles, drawn, shape, length, note), path)


def first_few(numbers: Iterable[int], size: int) -> str:
  """The smallest of some numbers below `size`, as text; or "all".

  >>> first_few(range(0, 128, 4), 128), first_few(range(9), 9)
  ('0, 4, 8, 12 ...', 'all')
  """
  if len(numbers := sorted(numbers)) == size:
    return "all"
  return ", ".join(map(str, numbers[:4])) + " ..." * (len(numbers) > 4)


def panels(
  titles: Sequence[str],
  patterns: Sequence[Pattern],
  shape: Sequence[int],
  length: int,
  note: str = "",
) -> "style.Figure":
  """A figure with a column for each pattern.

  Above are the positions of one query's keys, in the `shape` of the data, rows
  first; below is the pattern as a matrix of queries (rows) and keys, up to
  position 4,096.
  """
  labels = "keys of one query,\nby position", ALL_QUERIES
  figure, axes = columns(titles, labels, note)
  for (top, bottom), pattern in zip(axes.T, patterns, strict=True):
    show(top, image_of_query(pattern, length, shape), aspect="auto")
    show(bottom, image_of_matrix(pattern, min(length, MAX_LENGTH)))
    notes = ["yellow: depends on the content"] * bool(pattern.contents())
    if length > MAX_LENGTH:
      notes.append(f"the first {MAX_LENGTH:,} of {length:,}")
    bottom.set_xlabel("\n".join(notes))
  return figure


def columns(
  titles: Sequence[str], labels: Sequence[str], above: str
) -> "tuple[style.Figure, np.ndarray]":
  """A figure with two panels below each title, and its axes [2, titles]."""
  fill = functools.partial(textwrap.fill, width=LINE, max_lines=MAX_LINES)
  wrapped = [
    "\n".join(fill(line, placeholder=" ...") for line in title.splitlines())
    for title in map(_whole_terms, titles)
  ]
  lines = 1 + max(title.count("\n") for title in wrapped)
  height = 2 * PANEL + 0.2 * lines + 0.25 * len(above.splitlines())
  width = PANEL * max(len(titles), 2 if above else 1)
  figure, axes = style.subplots(2, len(titles), width, height)
  for axis, title in zip(axes[0], wrapped, strict=True):
    axis.set_title(title, fontsize="medium", color=style.DARK)
  for axis, label in zip(axes[:, 0], labels, strict=True):
    axis.set_ylabel(label, color=style.GRAY)
  if above:
    figure.suptitle(above, fontsize="medium")
  return figure, axes


def _whole_terms(title):
  """A title that breaks within no parentheses which fit on a line."""
  whole = lambda x: x[0].replace(" ", "\xa0" if len(x[0]) <= LINE else " ")
  return re.sub(r"\w*\([^()]*\)", whole, title)


def show(axis: Any, image: np.ndarray, aspect: str = "equal") -> None:
  """Shows an image in a panel, its cells outlined if they are few."""
  axis.imshow(image, aspect=aspect, interpolation="nearest")
  axis.set(xticks=[], yticks=[])
  axis.spines[:].set_color(style.GRID)
  rows, columns = image.shape[:2]
  if max(rows, columns) <= MAX_OUTLINED:
    lines = dict(color=style.GRID, lw=0.5)
    axis.hlines(np.arange(0.5, rows - 1), -0.5, columns - 0.5, **lines)
    axis.vlines(np.arange(0.5, columns - 1), -0.5, rows - 0.5, **lines)


def shown_query(n: int) -> int:
  """The query, of n, whose keys are drawn in the data."""
  return min(n - 1, int(n * 0.71))


def cell_size(n: int) -> int:
  """The number of positions, of n, that are joined into one pixel."""
  return -(-n // MAX_CELLS)


def image_of_query(
  pattern: Pattern, length: int, shape: Sequence[int]
) -> np.ndarray:
  """RGB image of what a query in the lower half sees, in data of a shape."""
  query, cells = shown_query(length), np.zeros(np.prod(shape), np.uint8)
  cells[:length] = _cells(pattern, query, np.arange(length))
  cells[query] = QUERY
  in_data = cells.reshape(shape[0], -1)
  return paint(in_data, *map(cell_size, in_data.shape))


def image_of_matrix(pattern: Pattern, n: int) -> np.ndarray:
  """RGB image of the pairs of the first n positions, without an n x n array."""
  i, size = np.arange(n, dtype=np.int32), cell_size(n)
  strips = []
  for start in range(0, n, size):
    q = i[start : start + size, None]
    cells = _cells(pattern, q, i)
    strips.append(paint(np.where(q == i, QUERY, cells), size, size))
  return np.concatenate(strips)


def _cells(pattern, q, k):
  """The values of pairs: KEY, MAYBE or 0."""
  if not pattern.contents():
    return np.where(pattern.mask(q, k), KEY, 0)
  cells = np.where(pattern.support().mask(q, k), MAYBE, 0)
  return np.where(pattern.static_part().mask(q, k), KEY, cells)


def paint(cells: np.ndarray, height: int, width: int) -> np.ndarray:
  """RGB image of cells, `height` x `width` of them joined into one pixel.

  A pixel is paler if fewer of its cells are keys; any query in it hides them.
  """
  colors = "#ffffff", style.LIGHT, style.DARK, style.PALE
  nothing, key, query, maybe = map(style.rgb, colors)
  share = pool((cells > 0) & (cells != MAYBE), height, width)[..., None]
  shade = np.where(share > 0, PALEST + (1 - PALEST) * share, 0)
  painted = nothing + (key - nothing) * shade
  has_maybe = pool(cells == MAYBE, height, width)[..., None] > 0
  painted = np.where(has_maybe & (share == 0), maybe, painted)
  has_query = pool(cells == QUERY, height, width)[..., None] > 0
  return np.where(has_query, query, painted).round().astype(np.uint8)


def pool(cells: np.ndarray, *sizes: int) -> np.ndarray:
  """Means over blocks of the given sizes; the last ones may be smaller."""
  for axis, size in enumerate(sizes):
    starts = np.arange(0, cells.shape[axis], size)
    lengths = np.diff(starts, append=cells.shape[axis])
    sums = np.add.reduceat(cells, starts, axis=axis, dtype=float)
    cells = sums / np.expand_dims(lengths, 1 - axis)
  return cells
