"""What follows from a pattern's pairs, at any length, without n x n work.

How many keys a query has, how long decoding must remember a key, after how
many layers a position sees its whole past. All are read off the cover of a
pattern: full nodes count whole, and only the tiles on its outline are looked
at. NumPy only.

>>> pattern = patterns.Local(2) | patterns.Strided(3)
>>> keys_per_query(pattern, 6).tolist()
[1, 2, 2, 3, 3, 3]
>>> last_readers(pattern, 6).tolist()
[3, 4, 5, 4, 5, 5]
>>> cache_size(pattern, 6)
4
>>> first_complete(((patterns.Local(3),), (patterns.Strided(3),)), 9).layers
2
"""

import bisect
import dataclasses
import functools

import numpy as np

from sparse_transformer.patterns import layout as layout_lib
from sparse_transformer.patterns.catalogue import Causal

TILE = 16  # positions: the finest nodes of a cover, decided pair by pair
EXACT = 4096  # positions between which every pair is followed through layers
INPUTS = 64  # that are followed to every position of longer sequences
CHUNK = 2**22  # values at a time


@dataclasses.dataclass(frozen=True, eq=False)
class Cover:
  """The pairs of one part, in its orders: full nodes, and tiles looked at.

  full: (size, rows, cols) of the nodes that are full; a size may come twice.
  rows, cols: the other tiles that hold pairs.
  hits: [tiles, TILE, TILE / 8], their pairs, eight keys in a byte.
  All are sorted by row.
  """

  query_order: np.ndarray
  key_order: np.ndarray
  full: tuple
  rows: np.ndarray
  cols: np.ndarray
  hits: np.ndarray

  def chunks(self, values, chosen=slice(None)):
    """Yields (rows, cols, pairs [tiles, TILE, TILE]) of the other tiles.

    values: how many will be made of each position of a tile.
    """
    indices = np.arange(len(self.rows))[chosen]
    step = max(1, CHUNK // (TILE * max(TILE, values)))
    for start in range(0, len(indices), step):
      here = indices[start : start + step]
      hits = np.unpackbits(self.hits[here], axis=-1).view(bool)
      yield self.rows[here], self.cols[here], hits


def covers(pattern, n):
  """The covers of a pattern's parts: each pair lies in exactly one."""
  return [_cover(part, n) for part in pattern.parts()]


@functools.lru_cache(maxsize=64)
def _cover(part, n):
  query_order, key_order = layout_lib.orders(part, n)
  *full, (_, rows, cols, counts) = layout_lib.cover(part, n, TILE)
  full = tuple((size, *_by_row(r, c)) for size, r, c, _ in full if len(r))
  rows, cols = _by_row(rows[counts > 0], cols[counts > 0])
  hits = np.zeros((len(rows), TILE, TILE // 8), np.uint8)
  step, offsets = CHUNK // TILE**2, np.arange(TILE, dtype=np.int32)
  for start in range(0, len(rows), step):
    here = slice(start, start + step)
    q, k = (x[here, None] * TILE + offsets for x in (rows, cols))
    inside = (q < n)[:, :, None] & (k < n)[:, None]
    q = np.take(query_order, q, mode="clip")[:, :, None]
    k = np.take(key_order, k, mode="clip")[:, None]
    hits[here] = np.packbits(inside & part.mask(q, k), axis=-1)
  return Cover(query_order, key_order, full, rows, cols, hits)


def _by_row(rows, cols):
  order = np.argsort(rows, kind="stable")
  return rows[order], cols[order]


def is_causal(pattern, n):
  """Whether no query attends to a later key."""
  return (pattern - Causal()).pairs(n) == 0


def keys_per_query(pattern, n):
  """How many keys each query attends to: int64 [n]."""
  counts = np.zeros(n, np.int64)
  for cover in covers(pattern, n):
    changes = np.zeros(n + 1, np.int64)
    for size, rows, cols in cover.full:
      widths = np.minimum(n - cols * size, size)
      np.add.at(changes, rows * size, widths)
      np.add.at(changes, np.minimum(rows * size + size, n), -widths)
    found = _pad(np.cumsum(changes[:-1]))
    for rows, _, hits in cover.chunks(1):
      np.add.at(found.reshape(-1, TILE), rows, hits.sum(-1))
    counts[cover.query_order] += found[:n]
  return counts


def area(pattern, n):
  """Positions of the nodes that hold all pairs: about those, and no fewer."""
  return sum(
    len(cover.rows) * TILE**2 + sum(len(r) * s**2 for s, r, _ in cover.full)
    for cover in covers(pattern, n)
  )


def count_tiles(part, n, tile):
  """How many tiles the layout of a part has, without laying it out."""
  total = 0
  for size, rows, cols, counts in layout_lib.cover(part, n, tile):
    held = counts > 0
    high, wide = (
      -(-np.minimum(n - x[held] * size, size) // tile) for x in (rows, cols)
    )
    total += int((high * wide).sum())
  return total


def last_readers(pattern, n):
  """The last query that attends to each key, int64 [n]; -1 where none does."""
  last = np.full(n, -1)
  for cover in covers(pattern, n):
    found = np.full(n, -1)
    for size, rows, cols in cover.full:
      starts = np.arange(0, n, size)
      latest = np.maximum.reduceat(cover.query_order, starts)
      nodes = np.full(len(starts), -1)
      np.maximum.at(nodes, cols, latest[rows])
      found = np.maximum(found, np.repeat(nodes, size)[:n])
    found, queries = _pad(found), _pad(cover.query_order)
    for rows, cols, hits in cover.chunks(1):
      readers = np.where(hits, queries.reshape(-1, TILE, 1)[rows], -1).max(1)
      np.maximum.at(found.reshape(-1, TILE), cols, readers)
    last[cover.key_order] = np.maximum(last[cover.key_order], found[:n])
  return last


def cache_size(pattern, n):
  """How many keys decoding must hold at once, at most.

  When query t is at work, those are the keys up to t, its own included, that
  it or a later query attends to. Local(l) needs l.
  """
  last, keys = last_readers(pattern, n), np.arange(n)
  read = last >= keys
  changes = np.bincount(keys[read], minlength=n + 1)
  changes -= np.bincount(last[read] + 1, minlength=n + 1)
  return int(np.cumsum(changes).max())


@dataclasses.dataclass(frozen=True)
class Reach:
  """What positions see through a network.

  layers: after how many every position sees its whole past (in a network
    that is not causal: the whole sequence), None if they never do.
  missing: then the first (query, key) without a path.
  positions: between so many first positions every pair was followed.
  inputs: and so many inputs to every position of the sequence.
  """

  layers: int | None
  missing: tuple | None
  positions: int
  inputs: int


def first_complete(layers, n):
  """The `Reach` of a network: tuple (layers) of tuples (heads) of patterns.

  Up to 4,096 positions every pair is followed. In longer sequences that is
  exact for the first ones, too, if the network is causal: a path stays
  between its key and its query. The rest is tested by 64 inputs.
  """
  causal = all(is_causal(p, n) for p in {p for heads in layers for p in heads})
  positions = n if n <= EXACT else EXACT if causal else 0
  inputs = _inputs(n) if n > EXACT else ()
  found = []
  if positions:
    found.append(_follow(layers, positions, np.arange(positions), causal))
  if len(inputs):
    found.append(_follow(layers, n, inputs, causal))
  missing = next((pair for _, pair in found if pair), None)
  depth = None if missing else max(depth for depth, _ in found)
  return Reach(depth, missing, positions, len(inputs))


def _inputs(n):
  """Both sides of the borders at powers of 2, then places anywhere."""
  powers = 2 ** np.arange((n - 1).bit_length())
  anywhere = np.random.RandomState(0).permutation(n)
  places = [*(powers - 1), *powers, *anywhere[:INPUTS]]
  return np.sort(list(dict.fromkeys(places))[:INPUTS])


def _follow(layers, n, inputs, causal):
  """(layers until all see what they should or None, the first missing pair).

  Bit j of a position says whether it sees input j; the residual stream keeps
  what it has.
  """
  seen = np.zeros((n, -(-len(inputs) // 64)), np.uint64)
  bits = np.arange(len(inputs))
  seen[inputs, bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)
  wanted = np.bitwise_or.accumulate(seen)
  if not causal:
    wanted = np.broadcast_to(wanted[-1], wanted.shape)
  idle = set()  # layers that add nothing to what is seen
  for depth, heads in enumerate(layers):
    if np.array_equal(seen, wanted):
      return depth, None
    if frozenset(heads) in idle:
      continue
    new = functools.reduce(
      np.bitwise_or, (_collect(p, n, seen) for p in set(heads)), seen
    )
    idle = {*idle, frozenset(heads)} if np.array_equal(new, seen) else set()
    seen = new
  if np.array_equal(seen, wanted):
    return len(layers), None
  missing = wanted & ~seen
  query = int(np.flatnonzero(missing.any(1))[0])
  flags = np.unpackbits(
    missing[query].astype("<u8").view(np.uint8), bitorder="little"
  )
  return None, (query, int(inputs[np.flatnonzero(flags)[0]]))


def _collect(pattern, n, seen):
  """Joins, for each query, the bits [n, words] of its keys."""
  result = np.zeros_like(seen)
  for cover in covers(pattern, n):
    result[cover.query_order] |= _collect_part(cover, seen[cover.key_order])
  return result


def _collect_part(cover, seen):
  (n, words), out = seen.shape, np.zeros_like(seen)
  for size, rows, cols in cover.full:
    nodes = np.bitwise_or.reduceat(seen, np.arange(0, n, size))
    joined = np.zeros_like(nodes)
    _join(joined, rows, nodes[cols])
    out |= np.repeat(joined, size, axis=0)[:n]
  tiles, out = (_pad(x).reshape(-1, TILE, words) for x in (seen, out))
  alive = tiles.any((1, 2))[cover.cols]
  for rows, cols, hits in cover.chunks(words, alive):
    found = np.zeros((len(rows), TILE, words), np.uint64)
    keys = tiles[cols]
    for key in range(TILE):
      found |= hits[:, :, key, None] * keys[:, None, key]
    _join(out, rows, found)
  return out.reshape(-1, words)[:n]


def _join(out, rows, values):
  """out[rows] |= values, for rows that are sorted and come repeatedly."""
  if len(rows):
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    out[rows[starts]] |= np.bitwise_or.reduceat(values, starts)


def _pad(x):
  """Zeros behind x, up to a whole number of tiles."""
  return np.pad(x, ((0, -len(x) % TILE), *((0, 0),) * (x.ndim - 1)))


def first_leak(pattern, n):
  """(query, key) of the first key that an earlier query sees, or None."""
  late = pattern - Causal()
  if not late.pairs(n):
    return None
  # The key is the last position of the shortest sequence that has a pair.
  k = bisect.bisect_left(range(n), 1, key=lambda last: late.pairs(last + 1))
  return int(np.argmax(late.mask(np.arange(k), k))), k


def reach(layers, n):
  """Booleans [n, n]: which input each position sees through all layers.

  layers: tuple (layers) of tuples (heads), as `assign` gives them. The
  residual stream counts: every position keeps what it has. A causal network
  is complete when this equals `Causal().matrix(n)`.
  """
  seen = np.eye(n, dtype=np.float32)
  for heads in layers:
    step = np.eye(n, dtype=bool)
    for pattern in set(heads):
      step = step | pattern.matrix(n)
    seen = np.minimum(step.astype(np.float32) @ seen, 1)
  return seen > 0
