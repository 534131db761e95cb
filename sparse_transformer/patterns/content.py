"""What content-based patterns are: a query's keys are found at run time.

Such a pattern gives each position of each head a few integer labels, from the
queries and keys, and turns them into sets of pairs: positions that are `Near`
in an order, and blocks of keys that are `Chosen`. These are also patterns:
their `mask` is the definition, and | & - keep their meaning. A `Spanned`
pattern has no labels: its pairs have weights, which fall with their distance,
as far as a parameter of each head says.

All are causal in the strict sense: which keys a query has depends only on
queries and keys up to its own position. A gradient cannot show this, since a
choice has none; changing the later positions does.

Axes: B batch, H heads, L positions, K width of queries and keys, C chosen
blocks, D directions. This module loads JAX only where it runs.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

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


@dataclasses.dataclass(frozen=True)
class Content(Checked):
  """A pattern whose pairs follow from queries and keys."""

  # Whether it is meant for keys that are the queries at unit length.
  keys_are_queries: ClassVar[bool] = False

  def mask(self, q: Integers, k: Integers) -> Booleans:
    raise ValueError(
      f"{shorten(self)} has no pairs before it is bound to queries and keys;"
      " its support() has all pairs that it may have"
    )

  def contents(self) -> tuple[Any, ...]:
    return (self,)

  def support(self) -> Pattern:
    return Causal()

  def split(self) -> tuple[Pattern | None, tuple[Pattern, ...]]:
    return None, (self,)

  def bind(self, sets: Mapping[Pattern, Pattern]) -> Pattern:
    return sets[self]

  def check(self, n: int) -> None:
    self.support().check(n)

  def check_within(self, pattern: Pattern) -> None:
    """Raises a ValueError if a combination may not contain this pattern."""

  def most_keys(self, n: int) -> int:
    """The most keys that one of n queries can have."""
    return n

  def given(self, num_heads: int, width: int) -> tuple[tuple[int, ...], str]:
    """(the shape, the name) of what `attend` takes for it; no name if nothing.

    `width` is that of a head's queries, K.
    """
    name = "directions" if self.num_directions else ""
    return (num_heads, self.num_directions, width), name

  @property
  def num_directions(self) -> int:
    """Number of directions that `labels` projects queries onto, D."""
    return 0

  def directions(self, width: int, layer: int = 0) -> np.ndarray | None:
    """Float32 [1, D, K], those of a layer; None where they are parameters."""
    del width, layer
    return None

  def labels(
    self,
    q_BLHK: Array,
    k_BMGK: Array,
    directions_HDK: Array,
    start: Array = 0,
    segments: tuple[Array, Array] | None = None,
  ) -> Array:
    """The labels that decide which pairs are in the set.

    The labels of a position may depend only on queries and keys up to there.

    Args:
      q_BLHK: queries, rounded to float32, without gradients.
      k_BMGK: keys from position 0 on, likewise; G divides H.
      directions_HDK: for each head, or for all of them if H = 1; None for no
        directions.
      start: position of the first query.
      segments: of queries and keys, int32 [B, L] and [B, M], where a query may
        only have keys of its segment: then labels may not depend on others.

    Returns:
      int32 [B, H, L, labels].
    """
    raise NotImplementedError

  def sets(
    self, labels_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple["Near | Chosen", ...]:
    """The sets whose union is this pattern, which may overlap.

    With segments, pairs of different ones are of no interest.
    """
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Spanned(Content):
  """A pattern whose pairs have weights, which fall with their distance.

  exp(score) is multiplied by them in the softmax. Each head has a span, a
  number of positions, which is given and gets a gradient.
  """

  def given(self, num_heads: int, width: int) -> tuple[tuple[int, ...], str]:
    del width
    return (num_heads,), "spans in positions, one per head"

  @property
  def longest(self) -> int:
    """The longest span."""
    raise NotImplementedError

  def end(self, spans: Array) -> Array:
    """The distance from which on weights are 0."""
    raise NotImplementedError

  def weights(self, spans: Array, distance: Array) -> Array:
    """The weights of pairs within the support; `distance` is their q - k."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound(Pattern):
  """A set of pairs that is found at run time.

  In its mask, positions of 4 or more axes have those of batch and heads first;
  others are the same for all heads. It equals only itself.
  """

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
    distance = _look_up(self.as_query, q) - _look_up(self.as_key, k)
    return (distance >= 0) & (distance < self.window)


@dataclasses.dataclass(frozen=True, eq=False)
class Chosen(_Bound):
  """Blocks of keys that each query chose."""

  blocks: Array  # int32 [B, H, L, C], -1 for none
  size: int  # positions in a block

  def mask(self, q: Integers, k: Integers) -> Booleans:
    blocks = _look_up(self.blocks, q)
    return (blocks == _with_lanes(k // self.size)[..., None]).any(-1)

  def within_tiles(self) -> Pattern:
    return Full()  # a tile has one block, and the queries that chose it


def _look_up(x_BHL: Array, positions: Integers) -> Array:
  """The rows of x at positions, an arbitrary row for negative ones."""
  import jax
  import jax.numpy as jnp

  at = _with_lanes(positions)
  index = at.clip(0).reshape(*at.shape[:2], -1, *(1,) * (x_BHL.ndim - 3))
  found = jnp.take_along_axis(x_BHL, index, axis=2)
  found = found.reshape(*found.shape[:2], *at.shape[2:], *x_BHL.shape[3:])
  # Otherwise the compiler looks up once for each pair.
  return jax.lax.optimization_barrier(found)


def _with_lanes(positions: Integers) -> Array:
  """Positions with axes of batch and heads."""
  import jax.numpy as jnp

  at = jnp.asarray(positions)
  return at.reshape((1,) * (4 - at.ndim) + at.shape)
