"""The tiles of a pattern that hold pairs, found without n x n work."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from sparse_transformer.patterns import intervals
from sparse_transformer.patterns.checks import PatternLike, orders


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
  """The tiles of one part that hold pairs, sorted by query tile, key tile.

  They are cut from the matrix of pairs in the orders of the part.
  """

  tile: int  # positions on a side
  query_order: np.ndarray  # int32 [n], the position at each place
  key_order: np.ndarray
  rows: np.ndarray  # int [tiles], the query tile
  cols: np.ndarray  # the key tile
  pairs: np.ndarray  # int [tiles], the number of pairs
  full: np.ndarray  # bool [tiles], whether the tile holds all its pairs


@functools.lru_cache(maxsize=256)
def lay_out(part: PatternLike, n: int, tile: int) -> Layout:
  """The `Layout` of a part on n positions."""
  query_order, key_order = orders(part, n)
  tiles = []
  for nodes in cover(part, n, tile):
    # A full node larger than a tile is laid out as the tiles it spans.
    span = nodes.size // tile
    i = np.arange(span)
    r, c = np.broadcast_arrays(
      nodes.rows[:, None, None] * span + i[:, None],
      nodes.cols[:, None, None] * span + i,
    )
    count = _area(r, c, tile, n) if span > 1 else nodes.pairs
    tiles.append([x.ravel()[count.ravel() > 0] for x in (r, c, count)])
  r, c, count = map(np.concatenate, zip(*tiles, strict=True))
  order = np.lexsort((c, r))
  r, c, count = r[order], c[order], count[order]
  full = count == _area(r, c, tile, n)
  return Layout(tile, query_order, key_order, r, c, count, full)


@functools.lru_cache(maxsize=256)
def pairs_of_part(part: PatternLike, n: int) -> int:
  """The exact number of pairs among n positions."""
  return sum(int(nodes.pairs.sum()) for nodes in cover(part, n, 64))


class Nodes(NamedTuple):
  """Square nodes of a quadtree over the matrix of pairs, all of one size."""

  size: int  # positions on a side
  rows: np.ndarray  # int [nodes], indices in units of `size`
  cols: np.ndarray
  pairs: np.ndarray  # int [nodes], the number of pairs of each


def cover(part: PatternLike, n: int, tile: int) -> Iterator[Nodes]:
  """Covers the pairs of a part, in its orders, with the nodes of a quadtree.

  Nodes without pairs are dropped, full ones are kept, and undecided ones are
  split in four, down to `tile`: the work grows with the outline of the pattern.

  Yields:
    The full nodes of each size, largest first; they are cut at the end of the
    sequence. Then the nodes of size `tile` that bounds can't decide, counted
    pair by pair.
  """
  if n < 1 or tile < 1:
    raise ValueError(f"{n=} and {tile=} must be at least 1")
  part.check(n)
  # Bounds of the values in a mask may exceed 32 bits.
  query_order, key_order = (x.astype(np.int64) for x in orders(part, n))
  rows = cols = np.zeros(1, np.int64)
  size = tile << (-(-n // tile) - 1).bit_length()
  while True:
    tile_pairs = intervals.TilePairs(size, rows, cols)
    q, k = tile_pairs.query(query_order), tile_pairs.key(key_order)
    truth = intervals.as_truth(part.mask(q, k))
    must = np.broadcast_to(truth.must, rows.shape)
    undecided = np.broadcast_to(truth.may, rows.shape) & ~must
    full = rows[must], cols[must]
    yield Nodes(size, *full, _area(*full, size, n))
    rows, cols = rows[undecided], cols[undecided]
    if size == tile:
      break
    size //= 2
    rows = (2 * rows[:, None] + (0, 0, 1, 1)).ravel()
    cols = (2 * cols[:, None] + (0, 1, 0, 1)).ravel()
    inside = (rows * size < n) & (cols * size < n)
    rows, cols = rows[inside], cols[inside]
  counts = np.zeros(len(rows), np.int64)
  for here, pairs in pairs_of_tiles(part, orders(part, n), tile, rows, cols):
    counts[here] = pairs.sum((1, 2))
  some = counts > 0
  yield Nodes(tile, rows[some], cols[some], counts[some])


def pairs_of_tiles(
  part: PatternLike,
  places: tuple[np.ndarray, np.ndarray],
  tile: int,
  rows: np.ndarray,
  cols: np.ndarray,
) -> Iterator[tuple[slice, np.ndarray]]:
  """Yields slices of tiles, and their pairs: bool [tiles, tile, tile].

  `places` are the positions of queries and of keys that are cut into tiles, -1
  for padding; `rows` and `cols`, int [tiles], are the tiles.
  """
  queries, keys = (
    np.pad(x, (0, -len(x) % tile), constant_values=-1).reshape(-1, tile)
    for x in places
  )
  step = max(1, 2**18 // tile**2)  # 256K pairs at a time, to stay in cache
  for start in range(0, len(rows), step):
    here = slice(start, start + step)
    q, k = queries[rows[here], :, None], keys[cols[here], None]
    yield here, part.mask(q.clip(0), k.clip(0)) & (q >= 0) & (k >= 0)


def _area(rows, cols, size, n):
  """Pairs of positions in each node, cut at the end of the sequence."""
  return np.clip(n - rows * size, 0, size) * np.clip(n - cols * size, 0, size)
