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

# The patterns of a network by layer and head, as `assign` returns them.
Layers: TypeAlias = Sequence[Sequence[Pattern]]
Pair: TypeAlias = tuple[int, int]


@functools.lru_cache(maxsize=64)
def _find_pairs(part, n):
  """Full nodes; the other tiles; their pairs, as bits [tiles, TILE, bytes]."""
  *full, tiles = layout_lib.cover(part, n, TILE)
  bits = np.zeros((len(tiles.rows), TILE, TILE // 8), np.uint8)
  at = orders(part, n), TILE, tiles.rows, tiles.cols
  for here, pairs in layout_lib.pairs_of_tiles(part, *at):
    bits[here] = np.packbits(pairs, axis=-1)
  return full, tiles, bits


def _reduce(ufunc, pattern, values, empty=0, by_key=False):
  """Reduces values [n, words] over each query's keys, or each key's queries."""
  (n, words), result = values.shape, np.full_like(values, empty)
  pattern.check(n)
  flip = slice(None, None, -1 if by_key else 1)

  def pad(x):
    x = np.pad(x, ((0, -n % TILE), (0, 0)), constant_values=empty)
    return x.reshape(-1, TILE, words)

  for part in pattern.parts():
    full, tiles, bits = _find_pairs(part, n)
    to_order, from_order = orders(part, n)[flip]
    given, found = values[from_order], np.full_like(values, empty)
    for nodes in full:
      rows, cols = (nodes.rows, nodes.cols)[flip]
      of_nodes = ufunc.reduceat(given, np.arange(0, n, nodes.size))
      joined = np.full_like(of_nodes, empty)
      ufunc.at(joined, rows, of_nodes[cols])
      found = ufunc(found, np.repeat(joined, nodes.size, axis=0)[:n])
    rows, cols = (tiles.rows, tiles.cols)[flip]
    given, found = pad(given), pad(found)
    step = max(1, CHUNK // (TILE**2 * words))
    for start in range(0, len(rows), step):
      here = slice(start, start + step)
      pairs = np.unpackbits(bits[here], axis=-1).view(bool)
      pairs = pairs.swapaxes(1, 2) if by_key else pairs
      of_pairs = np.where(pairs[..., None], given[cols[here], None], empty)
      ufunc.at(found, rows[here], ufunc.reduce(of_pairs, axis=2))
    found = found.reshape(-1, words)[:n]
    result[to_order] = ufunc(result[to_order], found)
  return result


def has_pairs(pattern: Pattern, n: int) -> bool:
  """Whether any of n queries attends to a key, or may for some content."""
  pattern.check(n)
  pattern = pattern.support()
  some = np.array([[0], [n // 2], [n - 1]])
  if np.any(pattern.mask(some, np.arange(n))):
    return True
  covers = (layout_lib.cover(part, n, TILE) for part in pattern.parts())
  return any(len(nodes.pairs) for nodes in itertools.chain(*covers))


def is_causal(pattern: Pattern, n: int) -> bool:
  """Whether no query attends to a later key, whatever the content."""
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
  lengths = range(1, n + 1)
  is_found = lambda k: has_pairs(late.beginning(k), k)
  k = bisect.bisect_left(lengths, True, key=is_found)
  return int(np.argmax(late.mask(np.arange(k), np.asarray(k)))), k


def keys_per_query(pattern: Pattern, n: int) -> np.ndarray:
  """The number of keys that each query attends to: int64 [n]."""
  return _reduce(np.add, pattern, np.ones((n, 1), np.int64))[:, 0]


@functools.lru_cache(maxsize=64)
def count_pairs(pattern: Pattern, n: int) -> int:
  """The number of pairs; the most there can be if content decides."""
  static, parts = pattern.split()
  found = 0 if static is None else static.pairs(n)
  for part in parts:
    keys = keys_per_query(part.support(), n).clip(max=most_keys(part, n))
    found += int(keys.sum())
  return found


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


def count_tiles(part: Pattern, n: int, tile: int) -> int:
  """The number of tiles in the layout of a part, without laying it out."""
  total = 0
  for size, rows, cols, _ in layout_lib.cover(part, n, tile):
    places = (n - np.stack([rows, cols]) * size).clip(max=size)
    total += int((-(-places // tile)).prod(0).sum())
  return total


def last_readers(pattern: Pattern, n: int) -> np.ndarray:
  """The last query that attends to each key: int64 [n], -1 for none."""
  queries = np.arange(n)[:, None]
  return _reduce(np.maximum, pattern, queries, empty=-1, by_key=True)[:, 0]


def cache_size(pattern: Pattern, n: int) -> int:
  """The largest number of keys that decoding must hold at once.

  At query t: the keys up to t that it or a later query attends to.
  """
  last, keys = last_readers(pattern, n), np.arange(n)
  is_read = last >= keys
  changes = np.bincount(keys[is_read], minlength=n + 1)
  changes -= np.bincount(last[is_read] + 1, minlength=n + 1)
  return int(np.cumsum(changes).max())


def reach(layers: Layers, n: int) -> np.ndarray:
  """The inputs that each position sees through all layers: bool [n, n].

  This includes the residual stream: every position keeps what it has.
  """
  _check(layers, n)
  seen = np.eye(n, dtype=np.float32)
  for heads in layers:
    steps = sum((pattern.matrix(n) for pattern in set(heads)), np.eye(n))
    seen = np.minimum(np.float32(steps) @ seen, 1)
  return seen > 0


def _check(layers, n):
  for pattern in itertools.chain(*layers):
    pattern.check(n)


@dataclasses.dataclass(frozen=True)
class Reach:
  """The result of following inputs through a network."""

  # After how many layers every position sees its entire past, or the entire
  # sequence if the network is not causal; None if never.
  layers: int | None
  missing: Pair | None  # in that case, the first (query, key) without a path
  positions: int  # every pair among these first positions was followed
  inputs: int  # inputs that were followed to every position of the sequence


def measure_reach(layers: Layers, n: int) -> Reach:
  """Finds after how many layers all positions see what they should.

  Up to 4,096 positions, every pair is followed. In longer sequences, the first
  4,096 are followed as exactly if the network is causal, since a path stays
  between its key and its query; the rest is sampled with 64 inputs.
  """
  _check(layers, n)
  causal = all(is_causal(p, n) for p in {p for heads in layers for p in heads})
  positions = n if n <= EXACT else EXACT if causal else 0
  inputs = _sampled_inputs(n) if n > EXACT else np.arange(0)
  found = [
    _follow(layers, size, followed, causal)
    for size, followed in ((positions, np.arange(positions)), (n, inputs))
    if len(followed)
  ]
  depths = [depth for depth, _ in found if depth is not None]
  missing = next((pair for _, pair in found if pair), None)
  depth = max(depths) if missing is None else None
  return Reach(depth, missing, positions, len(inputs))


def _sampled_inputs(n):
  """Both sides of the boundaries at powers of 2, then random positions."""
  powers = 2 ** np.arange((n - 1).bit_length())
  random = np.random.RandomState(0).permutation(n)
  places = [*(powers - 1), *powers, *random[:INPUTS]]
  return np.sort(list(dict.fromkeys(places))[:INPUTS])


def _follow(layers, n, inputs, causal):
  """(layers after which positions see all, None), or (None, a pair without)."""
  # Bit j of a position says whether it sees input j.
  layers = [[pattern.beginning(n) for pattern in heads] for heads in layers]
  seen = np.zeros((n, -(-len(inputs) // 64)), np.uint64)
  bits = np.arange(len(inputs))
  seen[inputs, bits // 64] = np.uint64(1) << (bits % 64).astype(np.uint64)
  wanted = np.bitwise_or.accumulate(seen)
  if not causal:
    wanted = np.broadcast_to(wanted[-1], wanted.shape)
  idle: set[frozenset[Pattern]] = set()  # layers that add nothing to `seen`
  for depth, heads in enumerate((*layers, ())):
    if np.array_equal(seen, wanted):
      return depth, None
    if frozenset(heads) in idle:
      continue
    found = (_reduce(np.bitwise_or, p, seen) for p in set(heads))
    new = functools.reduce(np.bitwise_or, found, seen)
    idle = {*idle, frozenset(heads)} if np.array_equal(new, seen) else set()
    seen = new
  missing = wanted & ~seen
  query = int(np.flatnonzero(missing.any(1))[0])
  words = missing[query].astype("<u8").view(np.uint8)
  flags = np.unpackbits(words, bitorder="little")
  return None, (query, int(inputs[np.flatnonzero(flags)[0]]))
