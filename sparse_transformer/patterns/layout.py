"""The tiles of a pattern that hold pairs, found without n x n work."""

import dataclasses
import functools

import numpy as np

from sparse_transformer.patterns import intervals


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
  """The tiles of one pattern that hold pairs, sorted by query tile, key tile.

  rows, cols: tile indices of queries and of keys, in the two orders.
  pairs: how many pairs each tile holds.
  full: whether that is all of the tile's positions.
  """

  tile: int
  query_order: np.ndarray
  key_order: np.ndarray
  rows: np.ndarray
  cols: np.ndarray
  pairs: np.ndarray
  full: np.ndarray

  @property
  def fill(self):
    """Share of the computed tile area that holds pairs."""
    return self.pairs.sum() / max(1, len(self.pairs) * self.tile**2)


@functools.lru_cache(maxsize=256)
def make_layout(pattern, n, tile):
  query_order, key_order = orders(pattern, n)
  rows, cols, pairs = [], [], []
  for size, r, c, count in cover(pattern, n, tile):
    # A full node larger than a tile is laid out as the tiles it spans.
    span = size // tile
    i = np.arange(span)
    r, c = np.broadcast_arrays(
      r[:, None, None] * span + i[:, None], c[:, None, None] * span + i
    )
    if span > 1:
      count = _area(r, c, tile, n)
    rows.append(r.ravel())
    cols.append(c.ravel())
    pairs.append(count.ravel())
  rows, cols, pairs = map(np.concatenate, (rows, cols, pairs))
  order = np.lexsort((cols, rows))
  order = order[pairs[order] > 0]
  rows, cols, pairs = rows[order], cols[order], pairs[order]
  full = pairs == _area(rows, cols, tile, n)
  return Layout(tile, query_order, key_order, rows, cols, pairs, full)


@functools.lru_cache(maxsize=256)
def count_pairs(pattern, n):
  return sum(int(count.sum()) for *_, count in cover(pattern, n, 64))


def cover(pattern, n, tile):
  """Covers the pairs with nodes: yields (size, rows, cols, pairs in each).

  Starts from one node over everything. Nodes without pairs are dropped, full
  ones are kept whole, undecided ones are split in four down to `tile`, where
  the last are counted position by position. So the work follows the outline
  of the pattern, not n x n.
  """
  if n < 1 or tile < 1:
    raise ValueError(f"{n=} and {tile=} must be at least 1")
  query_order, key_order = orders(pattern, n)
  rows = cols = np.zeros(1, np.int64)
  size = tile << (-(-n // tile) - 1).bit_length()
  while True:
    grid = intervals.Grid(size, rows, cols)
    truth = intervals.truth(
      pattern.mask(grid.query(query_order), grid.key(key_order))
    )
    must = np.broadcast_to(truth.must, rows.shape)
    undecided = np.broadcast_to(truth.may, rows.shape) & ~must
    full = rows[must], cols[must]
    yield size, *full, _area(*full, size, n)
    rows, cols = rows[undecided], cols[undecided]
    if size == tile:
      break
    size //= 2
    rows = (2 * rows[:, None] + (0, 0, 1, 1)).ravel()
    cols = (2 * cols[:, None] + (0, 1, 0, 1)).ravel()
    inside = (rows * size < n) & (cols * size < n)
    rows, cols = rows[inside], cols[inside]
  counts = _count_in_tiles(pattern, query_order, key_order, tile, rows, cols)
  yield tile, rows, cols, counts


def orders(pattern, n):
  return tuple(x.astype(np.int32) for x in pattern.orders(n))


def _area(rows, cols, size, n):
  """Positions in each node; those at the end of the sequence are cut."""
  return np.clip(n - rows * size, 0, size) * np.clip(n - cols * size, 0, size)


def _count_in_tiles(pattern, query_order, key_order, tile, rows, cols):
  """The number of pairs in each of the tiles (rows, cols), by looking."""
  counts = np.zeros(len(rows), np.int64)
  offsets = np.arange(tile)
  chunk = max(1, 2**18 // tile**2)  # 256K pairs at a time: they fit a cache
  for start in range(0, len(rows), chunk):
    here = slice(start, start + chunk)
    q = rows[here, None, None] * tile + offsets[:, None]
    k = cols[here, None, None] * tile + offsets
    inside = (q < len(query_order)) & (k < len(key_order))
    hit = inside & pattern.mask(
      np.take(query_order, q, mode="clip"), np.take(key_order, k, mode="clip")
    )
    counts[here] = hit.sum((1, 2))
  return counts
