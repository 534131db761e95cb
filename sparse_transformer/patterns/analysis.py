"""Properties of a pattern's pairs, at any length, without n x n work.

How many keys a query has, how long decoding must remember a key, after how
many layers a position sees its entire past. All are computed from the cover of
a pattern: full nodes are counted at once, and only the tiles on its outline
are evaluated pair by pair.

>>> from sparse_transformer.patterns import Local, Strided
>>> pattern = Local(2) | Strided(3)
>>> keys_per_query(pattern, 6).tolist()
[1, 2, 2, 3, 3, 3]
>>> last_readers(pattern, 6).tolist()
[3, 4, 5, 4, 5, 5]
>>> cache_size(pattern, 6)
4
>>> measure_reach(((Local(3),), (Strided(3),)), 9).layers
2
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np

from sparse_transformer.patterns import layout as layout_lib
from sparse_transformer.patterns.base import (
  Difference,
  Intersection,
  Pattern,
  Union,
)
from sparse_transformer.patterns.catalogue import Causal
from sparse_transformer.patterns.checks import orders
from sparse_transformer.patterns.content import Content

TILE = 16  # positions: the finest nodes of a cover, evaluated pair by pair
EXACT = 4096  # positions between which every pair is followed through layers
INPUTS = 64  # inputs followed to every position of longer sequences
CHUNK = 2**22  # values at a time
MIN_ROWS = 16  # queries whose expected keys are counted

# The patterns of a network by layer and head, as `assign` returns them.
Layers: TypeAlias = Sequence[Sequence[Pattern]]
Pair: TypeAlias = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class PackedPairs:
  """The pairs of one part, in its orders: full nodes, and tiles of bits.

  All are sorted by row.

  Attributes:
    query_order, key_order: int32 [n], the position at each place.
    full: (size, rows, cols) of the full nodes; a size may come twice.
    rows, cols: int [tiles], the other tiles that hold pairs.
    bits: uint8 [tiles, TILE, TILE // 8], their pairs, eight keys per byte.
  """

  query_order: np.ndarray
  key_order: np.ndarray
  full: tuple[tuple[int, np.ndarray, np.ndarray], ...]
  rows: np.ndarray
  cols: np.ndarray
  bits: np.ndarray

  def tiles(
    self, values: int = 1, chosen: np.ndarray | slice = slice(None)
  ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Unpacks the tiles that are not full, a few at a time.

    Args:
      values: how many values the caller computes for each position of a tile.
      chosen: index of the tiles to unpack; all by default.

    Yields:
      Their rows, their cols and their pairs, bool [tiles, TILE, TILE].
    """
    indices = np.arange(len(self.rows))[chosen]
    step = max(1, CHUNK // (TILE * max(TILE, values)))
    for start in range(0, len(indices), step):
      here = indices[start : start + step]
      pairs = np.unpackbits(self.bits[here], axis=-1).view(bool)
      yield self.rows[here], self.cols[here], pairs


def packed_pairs(pattern: Pattern, n: int) -> list[PackedPairs]:
  """The pairs of a pattern's parts: each pair is in exactly one of them."""
  return [_pack(part, n) for part in pattern.parts()]


@functools.lru_cache(maxsize=64)
def _pack(part: Pattern, n: int) -> PackedPairs:
  *full, last = layout_lib.cover(part, n, TILE)
  full_nodes = tuple(
    (nodes.size, *_by_row(nodes.rows, nodes.cols))
    for nodes in full
    if len(nodes.rows)
  )
  has_pairs = last.pairs > 0
  rows, cols = _by_row(last.rows[has_pairs], last.cols[has_pairs])
  bits = np.zeros((len(rows), TILE, TILE // 8), np.uint8)
  for here, pairs in layout_lib.pairs_of_tiles(part, n, TILE, rows, cols):
    bits[here] = np.packbits(pairs, axis=-1)
  return PackedPairs(*orders(part, n), full_nodes, rows, cols, bits)


def _by_row(
  rows: np.ndarray, cols: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  order = np.argsort(rows, kind="stable")
  return rows[order], cols[order]


def has_pairs(pattern: Pattern, n: int) -> bool:
  """Returns whether any of n queries attends to a key.

  For a pattern that follows the content: whether any query may.
  """
  pattern.check(n)
  pattern = pattern.support()
  some = np.array([[0], [n // 2], [n - 1]])
  if np.any(pattern.mask(some, np.arange(n))):
    return True
  return any(
    nodes.pairs.any()
    for part in pattern.parts()
    for nodes in layout_lib.cover(part, n, TILE)
  )


def is_causal(pattern: Pattern, n: int) -> bool:
  """Returns whether no query attends to a later key, whatever the content."""
  pattern.check(n)
  pattern = pattern.support()
  # Combinations of causal patterns need no search.
  match pattern:
    case Union(left, right) if is_causal(left, n) and is_causal(right, n):
      return True
    case Intersection(left, right) if is_causal(left, n) or is_causal(right, n):
      return True
    case Difference(left, _) if is_causal(left, n):
      return True
  return not has_pairs(pattern - Causal(), n)


def first_leak(pattern: Pattern, n: int) -> Pair | None:
  """The (query, key) of the first key that an earlier query sees, or None."""
  if is_causal(pattern, n):
    return None
  late = pattern.support() - Causal()
  # The key is the last position of the shortest sequence that has a pair.
  k = bisect.bisect_left(
    range(n), True, key=lambda last: has_pairs(late, last + 1)
  )
  return int(np.argmax(late.mask(np.arange(k), k))), k


def keys_per_query(pattern: Pattern, n: int) -> np.ndarray:
  """The number of keys that each query attends to: int64 [n]."""
  counts = np.zeros(n, np.int64)
  for packed in packed_pairs(pattern, n):
    changes = np.zeros(n + 1, np.int64)
    for size, rows, cols in packed.full:
      widths = np.minimum(n - cols * size, size)
      np.add.at(changes, rows * size, widths)
      np.add.at(changes, np.minimum(rows * size + size, n), -widths)
    found = _pad(np.cumsum(changes[:-1]))
    for rows, _, pairs in packed.tiles():
      np.add.at(found.reshape(-1, TILE), rows, pairs.sum(-1))
    counts[packed.query_order] += found[:n]
  return counts


@functools.lru_cache(maxsize=64)
def count_pairs(pattern: Pattern, n: int) -> int:
  """The number of pairs; of those that follow the content, the expected one.

  That is if labels are even (see `Content.chances`), within a few percent:
  long sequences are counted at some queries.
  """
  static, parts = pattern.split()
  known = 0 if static is None else static.pairs(n)
  rows = min(n, max(MIN_ROWS, CHUNK // n))
  # One query of each piece of the sequence, at a random place.
  borders = np.arange(rows + 1) * n // rows
  some = np.random.RandomState(0).randint(borders[:-1], borders[1:])
  keys = np.arange(n)
  found = sum(
    np.broadcast_to(_chances(part, q, keys, n), n).sum() * width
    for part in parts
    for q, width in zip(some, np.diff(borders), strict=True)
  )
  return known + round(float(found))


def _chances(
  pattern: Pattern, q: np.ndarray, k: np.ndarray, n: int
) -> np.ndarray:
  """Probabilities of pairs, as if sets were independent of each other."""
  if not isinstance(pattern, Union | Intersection | Difference):
    if isinstance(pattern, Content):
      return pattern.chances(q, k, n)
    return pattern.mask(q, k) * 1.0
  left, right = (_chances(p, q, k, n) for p in (pattern.left, pattern.right))
  match pattern:
    case Union():
      return 1 - (1 - left) * (1 - right)
    case Intersection():
      return left * right
  return left * (1 - right)


def most_keys(pattern: Pattern, n: int) -> int:
  """The most keys that one of n queries may have, whatever the content."""
  match pattern:
    case Content():
      return pattern.most_keys(n)
    case Union(left, right) if pattern.contents():
      return min(n, most_keys(left, n) + most_keys(right, n))
    case Intersection(left, right) if pattern.contents():
      return min(most_keys(left, n), most_keys(right, n))
    case Difference(left, _) if pattern.contents():
      return most_keys(left, n)
  return int(keys_per_query(pattern, n).max())


def area(pattern: Pattern, n: int) -> int:
  """The area of the nodes that hold all pairs: an upper bound, nearly tight."""
  return sum(
    len(packed.rows) * TILE**2
    + sum(len(rows) * size**2 for size, rows, _ in packed.full)
    for packed in packed_pairs(pattern, n)
  )


def count_tiles(part: Pattern, n: int, tile: int) -> int:
  """The number of tiles in the layout of a part, without laying it out."""
  total = 0
  for size, rows, cols, pairs in layout_lib.cover(part, n, tile):
    has_pairs = pairs > 0
    height, width = (
      -(-np.minimum(n - x[has_pairs] * size, size) // tile)
      for x in (rows, cols)
    )
    total += int((height * width).sum())
  return total


def last_readers(pattern: Pattern, n: int) -> np.ndarray:
  """The last query that attends to each key: int64 [n], -1 for none."""
  last = np.full(n, -1)
  for packed in packed_pairs(pattern, n):
    found = np.full(n, -1)
    for size, rows, cols in packed.full:
      starts = np.arange(0, n, size)
      latest = np.maximum.reduceat(packed.query_order, starts)
      nodes = np.full(len(starts), -1)
      np.maximum.at(nodes, cols, latest[rows])
      found = np.maximum(found, np.repeat(nodes, size)[:n])
    found, queries = _pad(found), _pad(packed.query_order)
    for rows, cols, pairs in packed.tiles():
      readers = np.where(pairs, queries.reshape(-1, TILE, 1)[rows], -1).max(1)
      np.maximum.at(found.reshape(-1, TILE), cols, readers)
    last[packed.key_order] = np.maximum(last[packed.key_order], found[:n])
  return last


def cache_size(pattern: Pattern, n: int) -> int:
  """The largest number of keys that decoding must hold at once.

  When query t is processed, those are the keys up to t, its own included,
  that it or a later query attends to. Local(l) needs l.
  """
  last, keys = last_readers(pattern, n), np.arange(n)
  is_read = last >= keys
  changes = np.bincount(keys[is_read], minlength=n + 1)
  changes -= np.bincount(last[is_read] + 1, minlength=n + 1)
  return int(np.cumsum(changes).max())


def reach(layers: Layers, n: int) -> np.ndarray:
  """The inputs that each position sees through all layers: bool [n, n].

  This includes the residual stream: every position keeps what it has. Every
  position of a causal network sees its entire past if this equals
  `Causal().matrix(n)`. For long sequences see `measure_reach`.
  """
  seen = np.eye(n, dtype=np.float32)
  for heads in layers:
    step = np.eye(n, dtype=bool)
    for pattern in set(heads):
      step = step | pattern.matrix(n)
    seen = np.minimum(step.astype(np.float32) @ seen, 1)
  return seen > 0


@dataclasses.dataclass(frozen=True)
class Reach:
  """The result of following inputs through a network.

  Attributes:
    layers: the number of layers after which every position sees its entire past
      (or the entire sequence, if the network is not causal); None if never.
    missing: in that case, the first (query, key) without a path.
    positions: every pair among this many first positions was followed.
    inputs: this many inputs were followed to every position of the sequence.
  """

  layers: int | None
  missing: Pair | None
  positions: int
  inputs: int


def measure_reach(layers: Layers, n: int) -> Reach:
  """After how many layers of a network all positions see what they should.

  Up to 4,096 positions, every pair is followed. In longer sequences, the first
  4,096 are followed as exactly if the network is causal, since a path stays
  between its key and its query; the rest is sampled with 64 inputs.
  """
  causal = all(is_causal(p, n) for p in {p for heads in layers for p in heads})
  positions = n if n <= EXACT else EXACT if causal else 0
  inputs = _sampled_inputs(n) if n > EXACT else np.arange(0)
  found = []
  if positions:
    found.append(_follow(layers, positions, np.arange(positions), causal))
  if len(inputs):
    found.append(_follow(layers, n, inputs, causal))
  depths = [depth for depth, _ in found if depth is not None]
  missing = next((pair for _, pair in found if pair), None)
  depth = max(depths) if missing is None else None
  return Reach(depth, missing, positions, len(inputs))


def _sampled_inputs(n: int) -> np.ndarray:
  """Both sides of the boundaries at powers of 2, then random positions."""
  powers = 2 ** np.arange((n - 1).bit_length())
  random = np.random.RandomState(0).permutation(n)
  places = [*(powers - 1), *powers, *random[:INPUTS]]
  return np.sort(list(dict.fromkeys(places))[:INPUTS])


def _follow(
  layers: Layers, n: int, inputs: np.ndarray, causal: bool
) -> tuple[int | None, Pair | None]:
  """Follows inputs through layers.

  Returns:
    (depth, None), if all positions see the inputs they should after `depth`
    layers; else (None, the first (query, input) without a path).
  """
  # Bit j of a position says whether it sees input j.
  seen = np.zeros((n, -(-len(inputs) // 64)), np.uint64)
  bits = np.arange(len(inputs))
  seen[inputs, bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)
  wanted = np.bitwise_or.accumulate(seen)
  if not causal:
    wanted = np.broadcast_to(wanted[-1], wanted.shape)
  idle: set[frozenset[Pattern]] = set()  # layers that add nothing to `seen`
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


def _collect(pattern: Pattern, n: int, seen: np.ndarray) -> np.ndarray:
  """For each query, the union of the bits [n, words] of its keys."""
  result = np.zeros_like(seen)
  for packed in packed_pairs(pattern, n):
    found = _collect_part(packed, seen[packed.key_order])
    result[packed.query_order] |= found
  return result


def _collect_part(packed: PackedPairs, seen: np.ndarray) -> np.ndarray:
  (n, words), out = seen.shape, np.zeros_like(seen)
  for size, rows, cols in packed.full:
    nodes = np.bitwise_or.reduceat(seen, np.arange(0, n, size))
    joined = np.zeros_like(nodes)
    _join(joined, rows, nodes[cols])
    out |= np.repeat(joined, size, axis=0)[:n]
  tiles, out = (_pad(x).reshape(-1, TILE, words) for x in (seen, out))
  has_bits = np.any(tiles, axis=(1, 2))[packed.cols]
  for rows, cols, pairs in packed.tiles(words, has_bits):
    found = np.zeros((len(rows), TILE, words), np.uint64)
    keys = tiles[cols]
    for key in range(TILE):
      found |= pairs[:, :, key, None] * keys[:, None, key]
    _join(out, rows, found)
  return out.reshape(-1, words)[:n]


def _join(out: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
  """out[rows] |= values, for sorted rows that may be repeated."""
  if len(rows):
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    out[rows[starts]] |= np.bitwise_or.reduceat(values, starts)


def _pad(x: np.ndarray) -> np.ndarray:
  """Pads with zeros to a multiple of the tile."""
  return np.pad(x, ((0, -len(x) % TILE), *((0, 0),) * (x.ndim - 1)))
