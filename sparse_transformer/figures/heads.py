"""Pictures of what trained heads attend to."""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sparse_transformer.figures import style
from sparse_transformer.figures.patterns import (
  MAX_CELLS,
  MAX_PANELS,
  PANEL,
  show,
  wrap,
)

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# (weights of one query [L], joined weights of all queries [cells, cells]); -1
# for pairs outside the pattern.
Weights = tuple[np.ndarray, np.ndarray]


def cell_size(n: int) -> int:
  """The number of positions, of n, that are joined into one pixel."""
  return -(-n // MAX_CELLS)


def shown_query(n: int) -> int:
  """The query, of n, whose keys are drawn in the data."""
  return min(n - 1, int(n * 0.71))


def join(weights: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
  """Joins cells of size x size pairs.

  Args:
    weights: [queries, keys].
    mask: which of them are pairs.
    size: a number of positions.

  Returns:
    The mean over queries of the weights on the keys of a cell; -1 for cells
    without pairs.
  """
  shares, has_pairs = (_sum(x, size) for x in (weights, mask))
  queries = np.diff(np.arange(0, len(weights), size), append=len(weights))
  return np.where(has_pairs > 0, shares / queries[:, None], -1)


def _sum(x, size):
  for axis in (0, 1):
    starts = np.arange(0, x.shape[axis], size)
    x = np.add.reduceat(x, starts, axis=axis, dtype=np.float32)
  return x


def save_heads(
  path: str | os.PathLike,
  title: str,
  titles: Sequence[str],
  heads: Sequence[Weights],
  shape: Sequence[int],
) -> None:
  """Draws the heads of a layer into a PNG file, at most the first 12.

  Args:
    path: path of the file.
    title: of the picture.
    titles: a title for each head.
    heads: what they attend to.
    shape: shape of the data, rows first.
  """
  panels(title, titles[:MAX_PANELS], heads[:MAX_PANELS], shape).savefig(path)


def panels(
  title: str,
  titles: Sequence[str],
  heads: Sequence[Weights],
  shape: Sequence[int],
) -> "Figure":
  """A figure with a column for each head.

  Above are the weights of one query, in the shape of the data; below those of
  all queries, one per row.
  """
  titles = [wrap(title) for title in titles]
  lines = max(title.count("\n") for title in titles) + title.count("\n") + 3
  figure, axes = style.subplots(
    2, len(heads), PANEL * max(2, len(heads)), 2 * PANEL + 0.25 * lines
  )
  query = shown_query(len(heads[0][0]))
  for (top, bottom), name, (of_query, of_all) in zip(
    axes.T, titles, heads, strict=True
  ):
    top.set_title(name, fontsize="medium", color=style.DARK)
    _show_query(top, of_query, query, math.prod(shape[1:]))
    show(bottom, paint(of_all, of_all.max(1, keepdims=True)))
    size = cell_size(len(of_query))
    if size > 1:
      bottom.set_xlabel(f"a pixel joins {size} x {size} pairs")
  for axis, label in zip(
    axes[:, 0],
    (
      f"weights of query {query:,},\nin the data",
      "of all queries,\none per row",
    ),
    strict=True,
  ):
    axis.set_ylabel(label, color=style.GRAY)
  legend = "white: no pair; the darker, the larger,\nrelative to its row"
  figure.suptitle(f"{title}\n{legend}", fontsize="medium")
  figure.tight_layout()
  return figure


def _show_query(axis, weights, query, columns):
  """Shows the weights of a query in rows of the data, and marks the query."""
  from matplotlib.patches import Rectangle

  rows = -(-len(weights) // columns)
  cells = np.full(rows * columns, -1.0)
  cells[: len(weights)] = weights
  cells = cells.reshape(rows, columns)
  height, width = (cell_size(x) for x in cells.shape)
  cells = np.maximum.reduceat(cells, np.arange(0, rows, height), axis=0)
  cells = np.maximum.reduceat(cells, np.arange(0, columns, width), axis=1)
  show(axis, paint(cells, cells.max()), aspect="auto")
  y, x = query // columns // height, query % columns // width
  # In a small image it is inside its cell, in a large one around it.
  size = [max(0.5, side / 48) for side in cells.shape[::-1]]
  corner = x - size[0] / 2, y - size[1] / 2
  axis.add_patch(
    Rectangle(corner, *size, fill=False, color=style.COLORS[4], lw=2)
  )


def paint(weights: np.ndarray, largest: np.ndarray) -> np.ndarray:
  """RGB image of weights, relative to `largest`, which broadcasts."""
  share = (weights.clip(0) / np.maximum(largest, 1e-30))[..., None]
  nothing, pale, dark = map(style.rgb, ("#ffffff", style.PALER, style.DARK))
  painted = pale + (dark - pale) * share
  painted = np.where(weights[..., None] < 0, nothing, painted)
  return painted.round().astype(np.uint8)
