"""Pictures of what trained heads attend to."""

import math
from collections.abc import Sequence

import numpy as np

from sparse_transformer.figures import masks, style

# (weights of one query [L], joined weights of all queries [cells, cells]); -1
# for pairs outside the pattern.
Weights = tuple[np.ndarray, np.ndarray]


def join(weights: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """Joins weights [n, n] of queries and keys into the cells of a picture.

  Means over queries of sums over keys; -1 where the mask has no pair.
  """
  size = masks.cell_size(len(weights))
  starts = np.arange(0, len(weights), size)
  keys = np.diff(starts, append=len(weights))
  shares, has_pairs = (masks.pool(x, size, size) for x in (weights, mask))
  return np.where(has_pairs > 0, shares * keys, -1)


def panels(
  title: str,
  titles: Sequence[str],
  heads: Sequence[Weights],
  shape: Sequence[int],
) -> "style.Figure":
  """A figure with a column for each head of a layer, at most the first 12.

  Above are the weights of one query, in the `shape` of the data, rows first;
  below, those of all queries, one per row.
  """
  titles, heads = titles[: masks.MAX_PANELS], heads[: masks.MAX_PANELS]
  n = len(heads[0][0])
  query, size = masks.shown_query(n), masks.cell_size(n)
  legend = "white: no pair; the darker, the larger,\nrelative to its row"
  labels = f"weights of query {query:,},\nin the data", masks.ALL_QUERIES
  figure, axes = masks.columns(titles, labels, f"{title}\n{legend}")
  for (top, bottom), (of_query, of_all) in zip(axes.T, heads, strict=True):
    _show_query(top, of_query, query, math.prod(shape[1:]))
    masks.show(bottom, paint(of_all, of_all.max(1, keepdims=True)))
    if size > 1:
      bottom.set_xlabel(f"a pixel joins {size} x {size} pairs")
  return figure


def _show_query(axis, weights, query, width):
  """Shows the weights of a query in rows of the data, and marks the query."""
  from matplotlib.patches import Rectangle

  missing = -len(weights) % width
  cells = np.pad(weights, (0, missing), constant_values=-1).reshape(-1, width)
  sizes = [masks.cell_size(side) for side in cells.shape]
  for side in (0, 1):
    starts = np.arange(0, cells.shape[side], sizes[side])
    cells = np.maximum.reduceat(cells, starts, axis=side)
  masks.show(axis, paint(cells, cells.max()), aspect="auto")
  y, x = query // width // sizes[0], query % width // sizes[1]
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
