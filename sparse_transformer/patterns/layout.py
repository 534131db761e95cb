"""The tiles of a pattern that contain pairs, found without n x n work."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparse_transformer.patterns import intervals
from sparse_transformer.patterns.checks import PatternLike, orders


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
  """A part's tiles that contain pairs, sorted by query tile, then key tile.

  The tiles are cut from the matrix of pairs after its queries and keys are
  sorted by the orders of the part.
  """

  tile: int  # positions on a side
  query_order: np.ndarray  # int32 [n], the sorted positions of queries
  key_order: np.ndarray
  rows: np.ndarray  # int [tiles], the query tile
  cols: np.ndarray  # the key tile
  pairs: np.ndarray  # int [tiles], the number of pairs
  full: np.ndarray  # bool [tiles], whether the tile contains all possible pairs


@functools.lru_cache(maxsize=256)
def lay_out(part: PatternLike, n: int, tile: int) -> Layout:
  """Lays out the tiles of a part that contain pairs.

  Args:
    part: a pattern with one pair of orders, from `Pattern.parts`.
    n: positions.
    tile: positions on a side.

  Returns:
    The `Layout`. All callers share it, so its arrays must not be changed.
  """
  query_order, key_order = orders(part, n)
  *full_nodes, counted = cover(part, n, tile)

  # Full nodes that are larger than a tile are split into tiles.
  tiles = [_cut(nodes, tile) for nodes in full_nodes]
  rows = np.concatenate([rows for rows, _ in tiles])
  cols = np.concatenate([cols for _, cols in tiles])
  area = _area(rows, cols, tile, n)
  inside = area > 0  # the last node may span tiles beyond the sequence

  rows = np.concatenate([rows[inside], counted.rows])
  cols = np.concatenate([cols[inside], counted.cols])
  pairs = np.concatenate([area[inside], counted.pairs])

  # Tiles are sorted by row, then by column, because backends process one row of
  # tiles after another.
  order = np.lexsort((cols, rows))
  return Layout(
    tile=tile,
    query_order=query_order,
    key_order=key_order,
    rows=rows[order],
    cols=cols[order],
    pairs=pairs[order],
    full=(pairs == _area(rows, cols, tile, n))[order],
  )


def _cut(nodes, tile):
  """Returns the rows and the columns of the tiles that nodes span."""
  span = nodes.size // tile
  offsets = np.arange(span)
  rows = nodes.rows[:, None, None] * span + offsets[:, None]
  cols = nodes.cols[:, None, None] * span + offsets
  rows, cols = np.broadcast_arrays(rows, cols)
  return rows.ravel(), cols.ravel()


@functools.lru_cache(maxsize=256)
def pairs_of_part(part: PatternLike, n: int) -> int:
  """Counts the pairs of a part among n positions, exactly."""
  # The size of tiles does not change the count. It only determines the size at
  # which nodes are no longer split, but counted pair by pair.
  return sum(int(nodes.pairs.sum()) for nodes in cover(part, n, 64))


class Nodes(NamedTuple):
  """Square nodes of a quadtree over the matrix of pairs, all of equal size."""

  size: int  # positions on a side
  rows: np.ndarray  # int [nodes], indices in units of `size`
  cols: np.ndarray
  pairs: np.ndarray  # int [nodes], the number of pairs in each node


def cover(part: PatternLike, n: int, tile: int) -> Iterator[Nodes]:
  """Covers the pairs of a part, in its orders, with the nodes of a quadtree.

  Nodes without pairs are dropped, full nodes are kept, and undecided nodes are
  split into four, down to size `tile`. The amount of work is therefore
  proportional to the outline of the pattern, not to its area.

  Yields:
    The full nodes of each size, largest first. Their pairs are counted only up
    to the end of the sequence. The last item contains the nodes of size `tile`
    that bounds cannot classify. The pairs of these nodes are counted one by
    one.
  """
  if n < 1 or tile < 1:
    raise ValueError(f"{n=} and {tile=} must be at least 1")
  part.check(n)
  # Positions are int64, because bounds of values in a mask may exceed 32 bits.
  query_order, key_order = (x.astype(np.int64) for x in orders(part, n))

  # The root is a single node that covers the sequence. Its side is a power of
  # two, in tiles.
  num_tiles = -(-n // tile)
  size = tile << (num_tiles - 1).bit_length()
  rows = cols = np.zeros(1, np.int64)
  while True:
    # Each node is classified as full, empty or undecided, from bounds of the
    # mask.
    tile_pairs = intervals.TilePairs(size, rows, cols)
    q = tile_pairs.query(query_order)
    k = tile_pairs.key(key_order)
    truth = intervals.as_truth(part.mask(q, k))
    is_full = np.broadcast_to(truth.must, rows.shape)
    is_undecided = np.broadcast_to(truth.may, rows.shape) & ~is_full

    yield Nodes(
      size=size,
      rows=rows[is_full],
      cols=cols[is_full],
      pairs=_area(rows[is_full], cols[is_full], size, n),
    )
    rows = rows[is_undecided]
    cols = cols[is_undecided]
    if size == tile:
      break

    # Each undecided node is split into four. Those beyond the sequence are
    # dropped.
    size //= 2
    rows = (2 * rows[:, None] + (0, 0, 1, 1)).ravel()
    cols = (2 * cols[:, None] + (0, 1, 0, 1)).ravel()
    inside = (rows * size < n) & (cols * size < n)
    rows = rows[inside]
    cols = cols[inside]

  # Undecided tiles are counted pair by pair. Some turn out to be empty.
  counts = np.zeros(len(rows), np.int64)
  for here, pairs in pairs_of_tiles(part, orders(part, n), tile, rows, cols):
    counts[here] = pairs.sum((1, 2))
  has_pairs = counts > 0
  yield Nodes(
    size=tile,
    rows=rows[has_pairs],
    cols=cols[has_pairs],
    pairs=counts[has_pairs],
  )


def pairs_of_tiles(
  part: PatternLike,
  positions: tuple[np.ndarray, np.ndarray],
  tile: int,
  rows: np.ndarray,
  cols: np.ndarray,
) -> Iterator[tuple[slice, np.ndarray]]:
  """Yields (a slice of the tiles, their pairs as bool [tiles, tile, tile]).

  Args:
    part: the pattern whose mask is evaluated.
    positions: sorted positions of queries and of keys, which are cut into
      tiles; -1 for padding.
    tile: positions on a side.
    rows, cols: int [tiles], the query tiles and key tiles.
  """
  queries, keys = (_tiles(x, tile) for x in positions)
  step = max(1, 2**18 // tile**2)  # 256K pairs at a time fit in the CPU cache
  for start in range(0, len(rows), step):
    here = slice(start, start + step)
    q = queries[rows[here], :, None]
    k = keys[cols[here], None]

    # Padding is evaluated as position 0, so that masks need not handle it.
    pairs = part.mask(q.clip(0), k.clip(0))
    yield here, pairs & (q >= 0) & (k >= 0)


def _tiles(positions, tile):
  """Cuts positions into tiles and pads the last tile with -1."""
  padding = -len(positions) % tile
  padded = np.pad(positions, (0, padding), constant_values=-1)
  return padded.reshape(-1, tile)


def _area(rows, cols, size, n):
  """Counts the pairs of positions in each node, up to the sequence's end."""
  height = np.clip(n - rows * size, 0, size)
  width = np.clip(n - cols * size, 0, size)
  return height * width
