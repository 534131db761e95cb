"""Content-based patterns: a query's keys are found at run time.

A pattern gives each position of each head integer labels, and turns them into
sets of pairs, `Near` or `Chosen`, which are also patterns. All are causal in
the strict sense: which keys a query has depends on nothing after it.

Axes: B batch, H heads, L positions, K width of queries and keys, C chosen
blocks, D directions, R rounds.
"""

import dataclasses
import functools
import importlib
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sparse_transformer.patterns import intervals
from sparse_transformer.patterns.base import (
  Booleans,
  Checked,
  Difference,
  Integers,
  Pattern,
  Union,
  register,
)
from sparse_transformer.patterns.catalogue import Causal, Full, Local
from sparse_transformer.patterns.checks import shorten

MAX_ROUNDS = 64  # of `LSH`: each compiles separate loops
PRODUCTS = 2**19  # of queries and directions, that are computed at a time
Array = Any  # of JAX


class Lazy:
  """A library that is loaded where it is first used."""

  def __init__(self, name: str):
    self._name = name

  def __getattr__(self, attribute: str) -> Any:
    return getattr(importlib.import_module(self._name), attribute)


jax, jnp = Lazy("jax"), Lazy("jax.numpy")


class Known(NamedTuple):
  """What labels follow from; a position's depend on nothing after it."""

  q_BLHK: Array  # queries, rounded to float32, without gradients
  k_BMGK: Array  # keys from position 0 on, likewise; G divides H
  # For each head, or for all of them if H = 1; None for no directions.
  directions_HDK: Array = None
  start: Array = 0  # position of the first query
  # Of queries and keys, int32 [B, L] and [B, M], where a query may only have
  # keys of its segment: then labels may not depend on others.
  segments: tuple[Array, Array] | None = None


@dataclasses.dataclass(frozen=True)
class Content(Checked):
  """A pattern whose pairs follow from queries and keys."""

  # Whether it is meant for keys that are the queries at unit length.
  keys_are_queries: ClassVar[bool] = False
  # Whether what it is given (`given`) are parameters of a network.
  is_learned: ClassVar[bool] = False

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

    `width` is the width of a head's queries, K.
    """
    name = "directions" if self.num_directions else ""
    return (num_heads, self.num_directions, width), name

  @property
  def num_directions(self) -> int:
    """Number of directions that `labels` projects queries onto, D."""
    return 0

  def directions(self, width: int, layer: int = 0) -> np.ndarray | None:
    """Float32 [1, D, K], for a layer; None if they are parameters."""
    return None

  def labels(self, known: Known) -> Array:
    """The labels that decide which pairs are in the set: int32 [B, H, L, C]."""
    raise NotImplementedError

  def sets(
    self, labels_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple["Near | Chosen", ...]:
    """The sets whose union this is; pairs across segments do not matter."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Spanned(Content):
  """A pattern whose pairs have weights, which fall with their distance.

  exp(score) is multiplied by them in the softmax. Each head has a span, a
  number of positions, which is given and gets a gradient.
  """

  max: int  # the longest span

  is_learned = True

  def given(self, num_heads: int, width: int) -> tuple[tuple[int, ...], str]:
    return (num_heads,), "spans in positions, one per head"

  def end(self, spans: Array) -> Array:
    """The distance from which on weights are 0."""
    raise NotImplementedError

  def weights(self, spans: Array, distance: Array) -> Array:
    """The weights of pairs within the support; `distance` is their q - k."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True, eq=False)
class _Bound(Pattern):
  """A set found at run time; positions of 4 axes have batch and heads first."""

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
    return (blocks == _with_heads(k // self.size)[..., None]).any(-1)

  def within_tiles(self) -> Pattern:
    return Full()  # a tile has one block, and the queries that chose it


def _look_up(x_BHL, positions):
  """The rows of x at positions, an arbitrary row for negative ones."""
  at = _with_heads(positions)
  index = at.clip(0).reshape(*at.shape[:2], -1, *(1,) * (x_BHL.ndim - 3))
  found = jnp.take_along_axis(x_BHL, index, axis=2)
  found = found.reshape(*found.shape[:2], *at.shape[2:], *x_BHL.shape[3:])
  # Otherwise the compiler looks up once for each pair.
  return jax.lax.optimization_barrier(found)


def _with_heads(positions):
  """Positions with axes of batch and heads."""
  at = jnp.asarray(positions)
  return at.reshape((1,) * (4 - at.ndim) + at.shape)


class _Grouped(Content):
  """The last `window` keys of a group, which directions tell: see `choose`."""

  window: int

  keys_are_queries = True

  @property
  def num_groups(self) -> int:
    return self.num_directions

  def choose(self, products_BHD: Array) -> Array:
    """The groups [B, H, R] of queries with these products."""
    raise NotImplementedError

  def check(self, n: int) -> None:
    super().check(n)
    largest = self.num_groups * max(n, self.window + 1) + n
    if largest >= intervals.LIMIT:
      raise ValueError(
        f"{shorten(self)}: coordinates of {n} positions reach {largest:,}, but"
        " they must fit in 32 bits: use fewer groups or a smaller window"
      )

  def labels(self, known: Known) -> Array:
    directions_HDK = known.directions_HDK

    def of_position(q_BHK):
      if directions_HDK.shape[0] == 1:
        return _products("bhk,dk->bhd", q_BHK, directions_HDK[0])
      return _products("bhk,hdk->bhd", q_BHK, directions_HDK)

    # A few positions at a time: there are far more products than choices.
    b, _, h, _ = known.q_BLHK.shape
    num = (b if isinstance(b, int) else 1) * h * directions_HDK.shape[1]
    found = jax.lax.map(
      lambda q_BHK: self.choose(of_position(q_BHK)),
      known.q_BLHK.swapaxes(0, 1),
      batch_size=max(1, PRODUCTS // num),
    )
    return jnp.moveaxis(found, 0, 2)


@register
@dataclasses.dataclass(frozen=True)
class LSH(_Grouped):
  """The last `window` earlier positions in the query's bucket of any round.

  Each round projects a query onto `buckets // 2` random vectors and their
  negatives: the largest product gives its bucket. A query without earlier
  positions in its buckets attends to itself. Source: Kitaev et al. 2020, arXiv
  2001.04451, where the chunks of a sorted sequence depend on later positions.
  """

  window: int
  buckets: int
  rounds: int = 1
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.buckets % 2:
      raise ValueError(f"{shorten(self)}: buckets must be even")
    if self.rounds > MAX_ROUNDS:
      raise ValueError(f"{shorten(self)}: rounds must be at most {MAX_ROUNDS}")

  def most_keys(self, n: int) -> int:
    return max(1, min(n - 1, self.rounds * self.window))

  @property
  def num_directions(self) -> int:
    return self.rounds * self.buckets // 2

  def directions(self, width: int, layer: int = 0) -> np.ndarray:
    random = np.random.RandomState([self.seed, layer])
    shape = 1, self.num_directions, width
    return random.standard_normal(shape).astype(np.float32)

  @property
  def num_groups(self) -> int:
    return self.buckets

  def choose(self, products_BHD: Array) -> Array:
    half = self.buckets // 2
    products = products_BHD.reshape(*products_BHD.shape[:2], -1, half)
    largest = jnp.abs(products).argmax(-1).astype(jnp.int32)
    product = jnp.take_along_axis(products, largest[..., None], -1)[..., 0]
    return jnp.where(product < 0, largest + half, largest)

  def sets(
    self, labels_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    each = (labels_BHLC[..., r] for r in range(self.rounds))
    rounds = [_sort(x, self.window, segments_BL) for x in each]
    is_first = functools.reduce(lambda x, y: x & y, (x[2] for x in rounds))
    # One less as a query than as a key: the query itself is out of reach,
    # except in the first round if it has no earlier position in any.
    queries = [keys - 1 for _, keys, _ in rounds]
    queries[0] = queries[0] + is_first.astype(queries[0].dtype)
    return tuple(
      Near(order, query, keys, self.window, reach=self.window)
      for (order, keys, _), query in zip(rounds, queries, strict=True)
    )


@register
@dataclasses.dataclass(frozen=True)
class Routing(_Grouped):
  """The last `window` positions in the query's cluster, itself included.

  A query is in the cluster whose centroid is nearest to it by angle.

  Centroids are parameters, which `labels` gets as its directions. Source: Roy
  et al. 2020, arXiv 2003.05997, where a cluster takes the nearest positions,
  earlier and later ones.
  """

  clusters: int
  window: int

  is_learned = True

  def most_keys(self, n: int) -> int:
    return min(n, self.window)

  @property
  def num_directions(self) -> int:
    return self.clusters

  def labels(self, known: Known) -> Array:
    lengths = jnp.linalg.norm(known.directions_HDK, axis=-1, keepdims=True)
    unit_HDK = known.directions_HDK / jnp.maximum(lengths, 1e-6)
    return super().labels(known._replace(directions_HDK=unit_HDK))

  def choose(self, products_BHD: Array) -> Array:
    return products_BHD.argmax(-1, keepdims=True).astype(jnp.int32)

  def sets(
    self, labels_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    labels_BHL = labels_BHLC[..., 0]
    order, coordinates, _ = _sort(labels_BHL, self.window, segments_BL)
    reach = self.window - 1
    return (Near(order, coordinates, coordinates, self.window, reach),)


@register
@dataclasses.dataclass(frozen=True)
class TopBlocks(Content):
  """The `num` best of the past blocks of `size` keys, chosen by each query.

  The score of a block is the product of the query with the mean of its keys.
  Blocks with keys of several segments are never chosen, nor is the query's own,
  which is incomplete: use a union with `Block(size)` or `Local`. Source: Lu et
  al. 2025, arXiv 2502.13189, whose top-k blocks are `Block(size) |
  TopBlocks(size, k - 1)`.
  """

  size: int
  num: int

  def most_keys(self, n: int) -> int:
    return self.size * min(self.num, max(0, n - 1) // self.size)

  def labels(self, known: Known) -> Array:
    """The blocks of each query, -1 for none."""
    q_BLHK, k_BMGK, _, start, segments = known
    b, n, num_key_heads, width = k_BMGK.shape
    _, num_queries, h, _ = q_BLHK.shape
    num_blocks = (n - 1) // self.size  # that a query may choose
    if not num_blocks:
      return jnp.full_like(q_BLHK, -1, jnp.int32, (b, h, num_queries, 1))
    keys = k_BMGK[:, : num_blocks * self.size]
    keys = keys.reshape(b, num_blocks, self.size, num_key_heads, width)
    means_BGDK = keys.mean(2).swapaxes(1, 2)
    means_BHDK = jnp.repeat(means_BGDK, h // num_key_heads, 1)
    scores_BHLD = _products("blhk,bhdk->bhld", q_BLHK, means_BHDK)
    own_L1 = (start + jnp.arange(num_queries)[:, None]) // self.size
    may_BLD = (jnp.arange(num_blocks)[None] < own_L1)[None]
    if segments is not None:
      of_queries_BL, of_keys_BM = segments
      blocks = of_keys_BM[:, : num_blocks * self.size]
      blocks_BDS = blocks.reshape(b, num_blocks, self.size)
      is_whole_BD = (blocks_BDS == blocks_BDS[..., :1]).all(-1)
      is_own_BLD = of_queries_BL[..., None] == blocks_BDS[:, None, :, 0]
      may_BLD = may_BLD & is_own_BLD & is_whole_BD[:, None]
    scores_BHLD = jnp.where(may_BLD[:, None], scores_BHLD, -jnp.inf)
    best, blocks = jax.lax.top_k(scores_BHLD, min(self.num, num_blocks))
    return jnp.where(best == -jnp.inf, -1, blocks).astype(jnp.int32)

  def sets(
    self, labels_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    return (Chosen(labels_BHLC, self.size),)


@register
@dataclasses.dataclass(frozen=True)
class AdaptiveSpan(Spanned):
  """The last keys, as far back as the learned span of the head.

  With a span of z positions, at most `max`, the softmax multiplies exp(score)
  of the key d positions before a query by the weight clip((ramp + z - d) /
  ramp, 0, 1). The ramp gives the span its gradient. Pairs of static patterns
  have weight 1: a union takes the larger weight, an intersection the smaller.
  Source: Sukhbaatar et al. 2019, arXiv 1905.07799, where the ramp of the
  longest span is cut off.
  """

  ramp: int = 32

  def __post_init__(self) -> None:
    super().__post_init__()
    self.support()  # which checks their sum

  def support(self) -> Pattern:
    return Local(self.max + self.ramp)

  def most_keys(self, n: int) -> int:
    return min(n, self.max + self.ramp)

  def end(self, spans: Array) -> Array:
    return spans + self.ramp

  def weights(self, spans: Array, distance: Array) -> Array:
    # At the ends of the ramp, the derivative with respect to the span is 0.
    room = spans + self.ramp - distance.astype(spans.dtype)
    first, last = (jnp.asarray(end, room.dtype) for end in (0, self.ramp))
    return jax.lax.clamp(first, room, last) / self.ramp

  def check_within(self, pattern: Any) -> None:
    is_twice = isinstance(pattern, Union) and pattern.left.contents()
    is_wrong = is_twice or isinstance(pattern, Difference)
    if pattern.contents() != (self,) or (is_wrong and pattern.right.contents()):
      raise ValueError(
        f"{shorten(pattern)}: a head can combine {shorten(self)}, whose pairs"
        " have weights, with static patterns only; it cannot be on both sides"
        " of |, or be subtracted"
      )


def _products(spec, x, y):
  """An einsum as exact as the device allows: its results are compared."""
  return jnp.einsum(spec, x, y, precision="highest")


def _sort(labels_BHL, window, segments_BL):
  """(positions by label, coordinates, which are first): [B, H, L] each."""
  n = labels_BHL.shape[-1]
  i = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), labels_BHL.shape)
  if segments_BL is None:
    ids = jnp.sort(labels_BHL * n + i)
    order, label = ids % n, ids // n
  else:
    segments = jnp.broadcast_to(segments_BL[:, None], labels_BHL.shape)
    *found, order = jax.lax.sort((labels_BHL, segments, i), num_keys=3)
    changes = [jnp.diff(x, axis=-1, prepend=x[..., :1]) != 0 for x in found]
    label = jnp.cumsum(changes[0] | changes[1], axis=-1, dtype=jnp.int32)
  before = jnp.concatenate([label[..., :1] - 1, label[..., :-1]], -1)
  invert = lambda order, i: jnp.zeros_like(order).at[order].set(i)
  places = jax.vmap(jax.vmap(invert))(order, i)
  is_first = jnp.take_along_axis(label != before, places, -1)
  if segments_BL is not None:
    labels_BHL = jnp.take_along_axis(label, places, -1)
  # They increase by 1 within a label, and by more than `window` to the next.
  return order, places + labels_BHL * (window + 1), is_first
