"""Properties of a pattern's pairs, at any length, without n x n work.

>>> from sparse_transformer.patterns import Local, Strided
>>> keys_per_query(Local(2) | Strided(3), 6).tolist()
[1, 2, 2, 3, 3, 3]
>>> measure_reach(((Local(3),), (Strided(3),)), 9).layers
2
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

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

# positions on a side of the smallest nodes, which are evaluated by pair
TILE = 16
EXACT = 4096  # positions up to which every pair is followed through the layers
INPUTS = 64  # sampled inputs that are followed in longer sequences
CHUNK = 2**22  # values that are processed at a time
LAST = 96  # positions whose receptive field is found: a row of a CIFAR-10 image

# The patterns of a network by layer and head, as `assign` returns them.
Layers: TypeAlias = Sequence[Sequence[Pattern]]
Pair: TypeAlias = tuple[int, int]


class _Pairs(NamedTuple):
  """The pairs of a part, with positions sorted by the part's orders."""

  full: list[layout_lib.Nodes]
  tiles: layout_lib.Nodes  # the nodes that are not full, of `TILE` positions
  # uint8 [tiles, TILE, TILE / 8], one bit for each pair of `tiles`
  bits: np.ndarray


@functools.lru_cache(maxsize=64)
def _find_pairs(part, n):
  """Finds the pairs of a part: full nodes, and the bits of the other tiles."""
  *full, tiles = layout_lib.cover(part, n, TILE)

  # Each pair takes a single bit, because the cache keeps the arrays.
  bits = np.zeros((len(tiles.rows), TILE, TILE // 8), np.uint8)
  for here, pairs in layout_lib.pairs_of_tiles(
    part,
    orders(part, n),
    TILE,
    tiles.rows,
    tiles.cols,
  ):
    bits[here] = np.packbits(pairs, axis=-1)
  return _Pairs(full, tiles, bits)


def _reduce(ufunc, pattern, values, empty=0, by_key=False):
  """Reduces values over the keys of each query, or the queries of each key.

  Args:
    ufunc: the operation, associative and commutative.
    pattern: any static pattern.
    values: [n, words], one row for each position that is read.
    empty: the neutral element of the operation, for positions without pairs.
    by_key: whether to reduce over the queries of each key, instead of over the
      keys of each query.

  Returns:
    The results [n, words], one row for each query, or for each key.
  """
  n = len(values)
  pattern.check(n)

  result = np.full_like(values, empty)
  for part in pattern.parts():
    readers, sources = orders(part, n)
    if by_key:
      readers, sources = sources, readers

    # Nodes and tiles are indexed by place in the sorted orders of the part, not
    # by position.
    pairs = _find_pairs(part, n)
    read = values[sources]
    by_place = ufunc(
      _reduce_full(ufunc, read, pairs, empty, by_key),
      _reduce_tiles(ufunc, read, pairs, empty, by_key),
    )
    result[readers] = ufunc(result[readers], by_place)
  return result


def _reduce_full(ufunc, read, pairs, empty, by_key):
  """Reduces over full nodes.

  All readers of a full node read the same values, which are reduced once.
  """
  n = len(read)
  result = np.full_like(read, empty)
  for nodes in pairs.full:
    rows = nodes.rows
    cols = nodes.cols
    if by_key:
      rows, cols = cols, rows

    # Each column of nodes is reduced once, and all full nodes in this column
    # use the result.
    by_node = ufunc.reduceat(read, np.arange(0, n, nodes.size))
    by_row = np.full_like(by_node, empty)
    ufunc.at(by_row, rows, by_node[cols])

    # The last node may extend beyond the end of the sequence, where it is cut.
    result = ufunc(result, np.repeat(by_row, nodes.size, axis=0)[:n])
  return result


def _reduce_tiles(ufunc, read, pairs, empty, by_key):
  """Reduces over the tiles that are not full, pair by pair.

  Args:
    ufunc: the reduction, such as np.maximum.
    read: the values to reduce, [n, words]. They are in the part's order of
      keys, or in its order of queries if `by_key`.
    pairs: the `_Pairs` of the part, whose `tiles` are reduced.
    empty: the result for a reader that reads nothing.
    by_key: whether keys read queries, instead of queries reading keys.

  Returns:
    The results [n, words], in the part's order of readers.
  """
  n, words = read.shape
  rows = pairs.tiles.rows
  cols = pairs.tiles.cols
  if by_key:
    rows, cols = cols, rows

  # The last tile is padded with neutral elements.
  padding = (0, -n % TILE), (0, 0)
  padded = np.pad(read, padding, constant_values=empty)
  by_tile = padded.reshape(-1, TILE, words)

  # The number of tiles processed at a time is limited, because each pair takes
  # memory for all of its words.
  result = np.full_like(by_tile, empty)
  tile_values = TILE**2 * words
  step = max(1, CHUNK // tile_values)
  for start in range(0, len(rows), step):
    here = slice(start, start + step)
    is_pair = np.unpackbits(pairs.bits[here], axis=-1).view(bool)
    if by_key:
      is_pair = is_pair.swapaxes(1, 2)

    values = by_tile[cols[here], None]
    by_pair = np.where(is_pair[..., None], values, empty)
    by_reader = ufunc.reduce(by_pair, axis=2)
    ufunc.at(result, rows[here], by_reader)
  return result.reshape(-1, words)[:n]


def has_pairs(pattern: Pattern, n: int) -> bool:
  """Returns whether any query attends to a key, for at least some content."""
  pattern.check(n)
  pattern = pattern.support()
  # For nearly all patterns, a few rows of the mask already contain a pair. Only
  # the cover can prove that there is none.
  some_queries = np.array([[0], [n // 2], [n - 1]])
  if np.any(pattern.mask(some_queries, np.arange(n))):
    return True

  for part in pattern.parts():
    for nodes in layout_lib.cover(part, n, TILE):
      if len(nodes.pairs):
        return True
  return False


def is_causal(pattern: Pattern, n: int) -> bool:
  """Returns whether no query attends to a later key, whatever the content."""
  pattern.check(n)
  pattern = pattern.support()
  # If the sides of a combination settle the question, its pairs need not be
  # searched.
  match pattern:
    case Union(left, right):
      return is_causal(left, n) and is_causal(right, n)
    case Difference(side) | Intersection(_, side) if is_causal(side, n):
      return True
    case Intersection(side, _) if is_causal(side, n):
      return True
  return not has_pairs(pattern - Causal(), n)


def first_leak(pattern: Pattern, n: int) -> Pair | None:
  """Returns (query, key) for the first key that an earlier query attends to.

  The query is the first one that attends to this key. Returns None for a causal
  pattern.

  >>> from sparse_transformer.patterns import Local
  >>> first_leak(Local(5, causal=False), 9)
  (0, 1)
  """
  if is_causal(pattern, n):
    return None
  late = pattern.support() - Causal()

  # If a sequence of some length has a leak, so do all longer sequences, and
  # bisection finds the shortest one.
  def has_leak(length):
    return has_pairs(late.beginning(length), length)

  # The leaked key is the last position of the shortest sequence.
  key = bisect.bisect_left(range(1, n), True, key=has_leak)

  earlier = np.arange(key)
  sees_key = late.mask(earlier, np.asarray(key))
  return int(np.argmax(sees_key)), key


def keys_per_query(pattern: Pattern, n: int) -> np.ndarray:
  """Counts the keys that each query attends to: int64 [n]."""
  return _reduce(np.add, pattern, np.ones((n, 1), np.int64))[:, 0]


@functools.lru_cache(maxsize=64)
def count_pairs(pattern: Pattern, n: int) -> int:
  """Counts the pairs; for content-based patterns, returns an upper bound.

  In a content-based part, the bound of each query is the number of its keys in
  the part's support or `most_keys`, whichever is smaller.
  """
  static, parts = pattern.split()
  total = 0 if static is None else static.pairs(n)

  for part in parts:
    keys = keys_per_query(part.support(), n)
    total += int(keys.clip(max=most_keys(part, n)).sum())
  return total


def most_keys(pattern: Pattern, n: int) -> int:
  """Returns the largest number of keys that one of n queries may have."""
  if not pattern.contents():
    return int(keys_per_query(pattern, n).max())

  # A combination is bounded by its sides, because the content is not known
  # here.
  match pattern:
    case Union(left, right):
      return min(n, most_keys(left, n) + most_keys(right, n))
    case Intersection(left, right):
      return min(most_keys(left, n), most_keys(right, n))
    case Difference(left):
      return most_keys(left, n)
  assert isinstance(pattern, Content)
  return pattern.most_keys(n)


def count_tiles(part: Pattern, n: int, tile: int) -> int:
  """Counts the tiles in the layout of a part, without laying it out."""
  total = 0
  for nodes in layout_lib.cover(part, n, tile):
    # The nodes at the end of the sequence span fewer tiles.
    corners = np.stack([nodes.rows, nodes.cols]) * nodes.size
    sides = (n - corners).clip(max=nodes.size)
    total += int((-(-sides // tile)).prod(0).sum())
  return total


def last_readers(pattern: Pattern, n: int) -> np.ndarray:
  """Finds the last query that attends to each key: int64 [n], -1 if none."""
  queries = np.arange(n)[:, None]
  return _reduce(np.maximum, pattern, queries, empty=-1, by_key=True)[:, 0]


def receptive_field(layers: Layers, n: int, last: int = LAST) -> np.ndarray:
  """Finds all positions that the last positions of a sequence can depend on.

  The result is the boolean product of the masks of all layers. Each position
  also sees itself, because a residual connection adds the input of each layer
  to its output.

  Args:
    layers: the static patterns of each layer's heads.
    n: positions.
    last: the number of positions at the end of the sequence for which the
      receptive field is computed.

  Returns:
    Booleans [last, n], one row for each of the last positions.

  >>> from sparse_transformer.patterns import Local
  >>> np.flatnonzero(receptive_field([[Local(3)], [Local(3)]], 64, last=1))
  array([59, 60, 61, 62, 63])
  """
  _check(layers, n)
  last = min(last, n)

  # Bit j of a position says whether the j-th of the last positions sees it.
  num_words = -(-last // 64)
  numbers = np.arange(last)
  is_seen = np.zeros((n, 64 * num_words), bool)
  is_seen[n - last + numbers, numbers] = True
  bits = np.packbits(is_seen, axis=1, bitorder="little")
  seen = bits.view(np.uint64)

  # Layers are followed from the last to the first: whatever sees a query also
  # sees its keys.
  for heads in reversed(layers):
    after = seen
    for pattern in set(heads):
      new = _reduce(np.bitwise_or, pattern, after, by_key=True)
      seen = seen | new

  is_seen = np.unpackbits(
    seen.view(np.uint8),
    axis=1,
    count=last,
    bitorder="little",
  )
  return is_seen.view(bool).T


def _check(layers, n):
  for pattern in itertools.chain.from_iterable(layers):
    pattern.check(n)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reach:
  """The result of tracing inputs through the layers of a network."""

  # The number of layers after which every position sees its entire past, or the
  # entire sequence if the network is not causal; None if that never happens.
  layers: int | None
  # if `layers` is None, the first (query, key) without a path
  missing: Pair | None
  # number of first positions among which every pair was followed
  positions: int
  inputs: int  # number of inputs that were followed to every position


def measure_reach(layers: Layers, n: int) -> Reach:
  """Finds after how many layers every position sees all that it should.

  In a causal network, a position should see its entire past; in others, the
  entire sequence. Up to 4,096 positions, every pair (query, key) is checked. In
  longer sequences, a sample of 64 inputs is followed to every position. If the
  network is causal, every pair among the first 4,096 positions is checked too.
  This needs no later positions, because all positions on a path lie between its
  key and its query.
  """
  heads = list(itertools.chain.from_iterable(layers))
  for pattern in heads:
    pattern.check(n)

  causal = all(is_causal(pattern, n) for pattern in set(heads))
  if n <= EXACT:
    positions = n
    inputs = np.arange(0)
  else:
    positions = EXACT if causal else 0
    inputs = _sampled_inputs(n)

  # First follow all pairs of the first positions, then the sampled inputs.
  depth = 0
  missing = None
  for size, followed in ((positions, np.arange(positions)), (n, inputs)):
    if len(followed) and missing is None:
      reached, missing = _follow(layers, size, followed, causal)
      depth = max(depth, reached)
  return Reach(
    layers=depth if missing is None else None,
    missing=missing,
    positions=positions,
    inputs=len(inputs),
  )


def _sampled_inputs(n):
  """Samples inputs: powers of 2, the positions before them, random positions.

  Powers of 2 are included because strides, blocks and windows tend to be powers
  of 2.
  """
  powers = 2 ** np.arange((n - 1).bit_length())
  random = np.random.RandomState(0).permutation(n)

  # A dict removes repeated candidates and keeps the order of the others.
  candidates = np.concatenate([powers - 1, powers, random[:INPUTS]])
  inputs = list(dict.fromkeys(candidates))
  return np.sort(inputs[:INPUTS])


def _follow(layers, n, inputs, causal):
  """Follows inputs through layers until positions see all that they should.

  Args:
    layers: the patterns of each layer's heads.
    n: positions.
    inputs: the positions to follow, sorted.
    causal: whether a position should see only the inputs up to itself, instead
      of all inputs.

  Returns:
    (number of layers that were needed, None) if every position sees all inputs
    that it should. Otherwise, (number of layers, the first (query, key) for
    which the query does not see the key).
  """
  # Bit j of a position says whether it sees input j.
  seen = np.zeros((n, -(-len(inputs) // 64)), np.uint64)
  bits = np.arange(len(inputs))
  seen[inputs, bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)

  wanted = np.bitwise_or.accumulate(seen)
  if not causal:
    wanted = np.broadcast_to(wanted[-1], wanted.shape)

  idle: set[frozenset[Pattern]] = set()  # layers that add nothing to `seen`
  depth = 0
  while depth < len(layers) and not np.array_equal(seen, wanted):
    heads = frozenset(layers[depth])
    depth += 1
    if heads in idle:
      continue

    # All heads of a layer read the output of the previous layer.
    before = seen
    for pattern in heads:
      new = _reduce(np.bitwise_or, pattern.beginning(n), before)
      seen = seen | new

    if np.array_equal(seen, before):
      idle.add(heads)
    else:
      idle.clear()

  missing = wanted & ~seen
  if not missing.any():
    return depth, None

  # Find the lowest missing bit of the first incomplete position. Words are
  # converted to little-endian, so that every machine finds the same bit.
  query = int(np.flatnonzero(missing.any(1))[0])
  words = missing[query].astype("<u8").view(np.uint8)
  is_missing = np.unpackbits(words, bitorder="little")
  return depth, (query, int(inputs[np.flatnonzero(is_missing)[0]]))
