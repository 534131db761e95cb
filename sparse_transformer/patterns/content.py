"""The protocol of content-based patterns: keys are found at run time.

A pattern gives each position of each head a few integers, its buckets, and
turns them into sets of pairs, `Near` or `Chosen`, which are also patterns. All
are causal in the strict sense: which keys a query has depends on nothing after
it. The patterns themselves are in `content_catalogue`.

Axes: B batch, H heads, L positions, K width of queries and keys, C buckets of
a position.
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

Array = Any  # of JAX


class Lazy:
  """A library that is imported when it is first used.

  Static patterns need NumPy alone, so that commands without others start fast.

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
  """What buckets are found from.

  The buckets of a position may depend on nothing after it.
  """

  q_BLHK: Array  # queries, rounded to float32, without gradients
  k_BMGK: Array  # keys from position 0 on, likewise; G divides H
  # For each head, or for all of them if H = 1; None for no directions. Where
  # blocks are given, these, int32 [B, H, L, C].
  directions_HDK: Array = None
  start: Array = 0  # position of the first query
  # Of queries and keys, int32 [B, L] and [B, M], where a query may only have
  # keys of its segment: then buckets may not depend on others.
  segments: tuple[Array, Array] | None = None


@dataclasses.dataclass(frozen=True)
class Content(Checked):
  """A pattern whose pairs are found from queries and keys.

  A subclass defines `find_buckets`, `sets` and `most_keys`, and the directions
  if it has some.
  """

  # Whether it is meant for keys that are the queries at unit length.
  keys_are_queries: ClassVar[bool] = False
  # Whether its directions are parameters of a network.
  is_learned: ClassVar[bool] = False
  # What selects blocks of keys that it is given in place of directions: the
  # "caller" of `attend`, or, in networks, `select` from the "symbols".
  blocks_from: ClassVar[str] = ""

  def mask(self, q: Integers, k: Integers) -> Booleans:
    raise ValueError(
      f"{shorten(self)} has no pairs before it is bound to queries and keys;"
      " its support() has all pairs that it may have"
    )

  def contents(self) -> tuple[Any, ...]:
    return (self,)

  def support(self) -> Pattern:
    # Any earlier key may be chosen, and no later one.
    return Causal()

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    return None, (self,)

  def bind(self, sets: Mapping[Pattern, Pattern]) -> Pattern:
    return sets[self]

  def check(self, n: int) -> None:
    # It has no mask of its own to evaluate.
    self.support().check(n)

  def most_keys(self, n: int) -> int:
    """The most keys that one of n queries can have."""
    return n

  @property
  def num_directions(self) -> int:
    """The number D of directions that queries are projected onto."""
    return 0

  def directions(self, width: int, layer: int = 0) -> np.ndarray | None:
    """The directions of a layer; None if they are parameters, or not needed.

    Args:
      width: K, of a head's queries.
      layer: its number; layers have different directions.

    Returns:
      Float32 [1, D, K], the same for all heads.
    """
    return None

  def given_shape(
    self, batch: Any, heads: int, length: Any, width: int
  ) -> tuple[Any, ...]:
    """The shape of what it is given in `attend`; () for nothing."""
    num = self.num_directions
    return (heads, num, width) if num else ()

  def select(self, symbols_BL: Array) -> Array:
    """The blocks of a network, int32 [B, 1, L, C].

    Args:
      symbols_BL: of which position t has those before t; None where a network
        gets them one by one.
    """
    raise NotImplementedError

  def find_buckets(self, known: Known) -> Array:
    """Finds the buckets of each position, which decide its pairs.

    A bucket is a hash value, a cluster, or a block of keys. Those of a position
    must depend on nothing after it. Nothing checks this at run time:
    tests/attention/test_content.py looks for leaks of every pattern.

    Args:
      known: queries, keys, and what else there is.

    Returns:
      Buckets, int32 [B, H, L, C].
    """
    raise NotImplementedError

  def sets(
    self, buckets_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple["Near | Chosen", ...]:
    """Makes the sets of pairs whose union this pattern is.

    Each pair must lie in `support()`, which by default is k <= q. Backends do
    not check it again.

    Args:
      buckets_BHLC: from `find_buckets`.
      segments_BL: of positions; pairs across segments do not matter.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound(Pattern):
  """A set of pairs found at run time.

  The positions that its mask is asked for have any two axes, or, where heads
  differ, four: batch and heads come first.
  """

  # Arrays have no hash: each set is equal to itself alone.
  __eq__ = object.__eq__
  __hash__ = object.__hash__

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    raise NotImplementedError("the order is found at run time")

  def within_tiles(self) -> Pattern:
    """The mask to apply within the tiles that this set is run in."""
    return self


@dataclasses.dataclass(frozen=True, eq=False)
class Near(_Bound):
  """Pairs with 0 <= as_query[q] - as_key[k] < window.

  Coordinates are int32 [B, H, L] and found at run time.
  """

  order: Array  # positions [B, H, L], in whose order pairs fill tiles
  as_query: Array  # the coordinate of each position as a query
  as_key: Array
  window: int
  reach: int  # how many places before its query in `order` a key may be

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # Groups are further apart than the window, see `content_catalogue._sort`.
    distance = _look_up(self.as_query, q) - _look_up(self.as_key, k)
    return (distance >= 0) & (distance < self.window)


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen(_Bound):
  """Blocks of keys that each query chose."""

  blocks: Array  # int32 [B, H, L, C], -1 for none
  size: int  # positions in a block

  def mask(self, q: Integers, k: Integers) -> Booleans:
    blocks = _look_up(self.blocks, q)
    # A query without a choice has -1, which is the block of no key.
    return (blocks == _with_heads(k // self.size)[..., None]).any(-1)

  def within_tiles(self) -> Pattern:
    return Full()  # a tile has one block, and the queries that chose it


def _look_up(x_BHL, positions):
  """Looks up the values of x at positions; any value for negative ones.

  Args:
    x_BHL: [B, H, L, ...].
    positions: of 2 axes, or of 4 with batch and heads first.

  Returns:
    Values of the shape of `positions`, followed by the last axes of x.
  """
  at = _with_heads(positions)
  heads = at.shape[:2]
  sides = at.shape[2:]
  trailing = x_BHL.shape[3:]

  # The positions become one axis, as `take_along_axis` requires.
  index = at.clip(0)
  index = index.reshape(heads + (-1,) + (1,) * len(trailing))
  rows = jnp.take_along_axis(x_BHL, index, axis=2)
  rows = rows.reshape(rows.shape[:2] + sides + trailing)

  # Otherwise the compiler looks up once for each pair.
  return jax.lax.optimization_barrier(rows)


def _with_heads(positions):
  """Adds axes of batch and heads to positions that lack them."""
  at = jnp.asarray(positions)
  return at.reshape((1,) * (4 - at.ndim) + at.shape)
