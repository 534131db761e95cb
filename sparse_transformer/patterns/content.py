"""The protocol of content-based patterns, which choose keys at run time.

A content-based pattern gives each position of each head a few integers, called
its buckets. It turns the buckets into sets of pairs, `Near` or `Chosen`, which
are patterns too. All content-based patterns are causal in a strict sense: even
the choice of a query's keys depends on nothing after the query. The patterns
themselves are in `content_catalogue`.

Axes: B batch, H query heads, G KV heads, L positions of queries, M positions of
keys, K width of queries and keys, D directions, C buckets of a position.
"""

import dataclasses
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparse_transformer.patterns.base import (
  Booleans,
  Checked,
  Integers,
  Pattern,
)
from sparse_transformer.patterns.catalogue import Causal, Full
from sparse_transformer.patterns.checks import shorten

Array = Any  # a JAX array


class Lazy:
  """A library that is imported when it is first used.

  Static patterns need only NumPy, so commands that use only static patterns
  start fast.

  >>> jnp = Lazy("jax.numpy")
  >>> print(jnp.arange(3))
  [0 1 2]
  """

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    return getattr(importlib.import_module(self._name), attribute)


jax = Lazy("jax")
jnp = Lazy("jax.numpy")


class Known(NamedTuple):
  """The arrays from which `Content.find_buckets` computes buckets.

  The buckets of a position may depend on nothing after it.
  """

  q_BLHK: Array  # queries as float32, without gradients
  # Keys from position 0 as float32, without gradients; G divides H.
  k_BMGK: Array
  # Directions of each head, or of all heads if its first axis is 1; None if the
  # pattern has none. If `Content.blocks_from` is set, the given blocks instead,
  # int32 [B, H, L, C].
  directions_HDK: Array = None
  start: Array = 0  # position of the first query
  # Segments of queries and of keys, int32 [B, L] and [B, M], if a query may
  # attend only to keys in its own segment. Buckets must then not depend on
  # other segments.
  segments: tuple[Array, Array] | None = None


@dataclasses.dataclass(frozen=True)
class Content(Checked):
  """A pattern whose pairs are found from queries and keys at run time.

  A subclass defines `find_buckets`, `sets` and `most_keys`. A subclass that
  uses directions also defines `num_directions` and `directions`.
  """

  # Whether the pattern is meant for keys that are the queries, scaled to unit
  # length.
  keys_are_queries: ClassVar[bool] = False
  # Whether the directions are parameters of the network.
  is_learned: ClassVar[bool] = False
  # What selects the blocks of keys, if the pattern is given blocks instead of
  # directions: "caller" stands for the caller of `attend`; with "symbols",
  # `select` computes the blocks from the symbols of a network. Otherwise "".
  blocks_from: ClassVar[str] = ""

  def mask(self, q: Integers, k: Integers) -> Booleans:
    raise ValueError(
      f"{shorten(self)} has no pairs before it is bound to queries and keys;"
      " use its support(), which contains all pairs that it may have"
    )

  def contents(self) -> tuple[Any, ...]:
    return (self,)

  def support(self) -> Pattern:
    # Any key up to the query may be chosen, but no later key.
    return Causal()

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    return None, (self,)

  def bind(self, sets: Mapping[Pattern, Pattern]) -> Pattern:
    return sets[self]

  def check(self, n: int) -> None:
    # A content-based pattern has no mask that could be evaluated.
    self.support().check(n)

  def most_keys(self, n: int) -> int:
    """Returns the largest number of keys that one of n queries can have."""
    return n

  @property
  def num_directions(self) -> int:
    """The number D of directions that queries are projected onto."""
    return 0

  def directions(self, width: int, layer: int = 0) -> np.ndarray | None:
    """Returns a layer's directions; None if they are parameters, or not used.

    Args:
      width: K, the width of a head's queries.
      layer: the index of the layer; layers have different directions.

    Returns:
      Float32 [1, D, K], the same for all heads.
    """
    return None

  def given_shape(
    self, batch: Any, heads: int, length: Any, width: int
  ) -> tuple[Any, ...]:
    """Returns the shape of the array that `attend` needs; () if it needs none.

    The array contains directions or, if `blocks_from` is set, blocks.
    """
    num = self.num_directions
    return (heads, num, width) if num else ()

  def select(self, symbols_BL: Array) -> Array:
    """Selects blocks of keys from a network's symbols: int32 [B, 1, L, C].

    Args:
      symbols_BL: the symbols of the sequence. The blocks of position t may
        depend only on symbols before t. None if a network receives symbols one
        by one.
    """
    raise NotImplementedError

  def find_buckets(self, known: Known) -> Array:
    """Finds the buckets of each position, which determine its pairs.

    A bucket is a hash value, a cluster, or a block of keys. The buckets of a
    position must depend on nothing after it. This is not checked at run time,
    but tests/attention/test_content.py tests every registered pattern for
    leaks.

    Args:
      known: the queries, the keys, and everything else that buckets may depend
        on.

    Returns:
      Buckets, int32 [B, H, L, C].
    """
    raise NotImplementedError

  def sets(
    self, buckets_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple["Near | Chosen", ...]:
    """Makes the sets of pairs whose union is this pattern.

    Each pair must be in `support()`, which is k <= q by default. Backends do
    not check this again.

    Args:
      buckets_BHLC: from `find_buckets`.
      segments_BL: segments of positions, or None. Pairs across segments may be
        included, because they are masked elsewhere.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound(Pattern):
  """A set of pairs found at run time.

  The mask takes arrays of positions with two axes. If positions differ between
  heads, the arrays have four axes, of which the first two are batch and heads.
  """

  # Arrays have no hash, so each set is equal only to itself.
  __eq__ = object.__eq__
  __hash__ = object.__hash__

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("the order is found at run time")

  def within_tiles(self) -> Pattern:
    """Returns the mask to apply within the tiles of this set."""
    return self


@dataclasses.dataclass(frozen=True, eq=False)
class Near(_Bound):
  """The pairs with 0 <= as_query[q] - as_key[k] < window.

  `as_query` and `as_key` are int32 coordinates [B, H, L], which are computed at
  run time.
  """

  order: Array  # positions [B, H, L], in an order in which pairs fill tiles
  as_query: Array  # the coordinate of each position when it is a query
  as_key: Array
  window: int
  reach: int  # the most places in `order` by which a key may precede its query

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # Different groups are further apart than the window, see
    # `content_catalogue._sort`.
    distance = _look_up(self.as_query, q) - _look_up(self.as_key, k)
    return (distance >= 0) & (distance < self.window)


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen(_Bound):
  """The keys in the blocks that each query chose."""

  blocks: Array  # int32 [B, H, L, C], -1 for none
  size: int  # positions in a block

  def mask(self, q: Integers, k: Integers) -> Booleans:
    blocks = _look_up(self.blocks, q)
    # An unused choice is -1, which is the block of no key.
    return (blocks == _with_heads(k // self.size)[..., None]).any(-1)

  def within_tiles(self) -> Pattern:
    return Full()  # a tile pairs one block with queries that chose it


def _look_up(x_BHL, positions):
  """Looks up the values of x at positions.

  The values at negative positions are arbitrary.

  Args:
    x_BHL: [B, H, L, ...].
    positions: integers with 2 axes, or with more: batch, heads and others.

  Returns:
    Values of the shape of `positions`, followed by the last axes of x.
  """
  at = _with_heads(positions)
  heads = at.shape[:2]
  sides = at.shape[2:]
  trailing = x_BHL.shape[3:]

  # All axes of positions are merged into one, as `take_along_axis` requires.
  index = at.clip(0)
  index = index.reshape(heads + (-1,) + (1,) * len(trailing))
  rows = jnp.take_along_axis(x_BHL, index, axis=2)
  rows = rows.reshape(rows.shape[:2] + sides + trailing)

  # Without this barrier, the compiler would repeat the lookup for each pair.
  return jax.lax.optimization_barrier(rows)


def _with_heads(positions):
  """Adds axes of batch and heads to positions that lack them."""
  at = jnp.asarray(positions)
  return at.reshape((1,) * (4 - at.ndim) + at.shape)
