"""Content-based patterns: a query's keys are found at run time.

Such a pattern gives each position of each head a few integer labels, from the
queries and keys, and turns them into sets of pairs of two kinds: positions
that are `Near` in an order, and blocks of keys that are `Chosen`. These are
also patterns: their `mask` is the definition, and | & - keep their meaning.

All are causal in the strict sense: which keys a query has depends only on
queries and keys up to its own position. A gradient cannot show this, since a
choice has none; changing the later positions does.

Axes: B batch, H heads, L positions, K width of queries and keys, R rounds,
C chosen blocks, D directions. This module loads JAX only where it runs.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

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

Array = Any  # of JAX
Segments = tuple[Array, Array] | None
MAX_ROUNDS = 64  # of `LSH`: each compiles separate loops
PRODUCTS = 2**19  # of queries and directions, that are computed at a time


@dataclasses.dataclass(frozen=True)
class Content(Checked):
  """A pattern whose pairs follow from queries and keys."""

  # Whether it is meant for keys that are the queries at unit length.
  shares: ClassVar[bool] = False

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

  def chances(self, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    """The probability of each pair among n positions, for even labels.

    Real labels are uneven: they differ in how many positions they have, and
    neighbors are alike. Positions and result broadcast as in `mask`.
    """
    raise NotImplementedError

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
    segments: Segments = None,
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


@register
@dataclasses.dataclass(frozen=True)
class LSH(Content):
  """The last `window` earlier positions in the query's bucket of any round.

  A hash puts each query into one of `buckets` in each round: the largest of
  its products with `buckets // 2` random vectors and with their negatives. A
  query without earlier positions in its buckets attends to itself.

  Source: Kitaev et al. 2020, arXiv 2001.04451. They attend within chunks of
  the sorted sequence, whose boundaries depend on how many later positions the
  preceding buckets hold. Here the keys of a query depend only on its past.

  Attributes:
    window: number of keys in a round.
    buckets: number of buckets, even.
    rounds: number of hashes.
    seed: seed of the random vectors.
  """

  window: int
  buckets: int
  rounds: int = 1
  seed: int = 0

  shares = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.buckets % 2:
      raise ValueError(
        f"{shorten(self)}: buckets must be even, since each random vector"
        " makes two"
      )
    if self.rounds > MAX_ROUNDS:
      raise ValueError(f"{shorten(self)}: rounds must be at most {MAX_ROUNDS}")

  def check(self, n: int) -> None:
    super().check(n)
    _check_coordinates(self, n, self.buckets)

  def most_keys(self, n: int) -> int:
    return max(1, min(n - 1, self.rounds * self.window))

  def chances(self, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    in_round = _chances_by_distance(self.buckets, self.window, n)[q - k]
    in_any = 1 - (1 - in_round) ** self.rounds
    alone = (1 - 1 / self.buckets) ** (self.rounds * q)
    return np.where(q > k, in_any, np.where(q == k, alone, 0))

  @property
  def num_directions(self) -> int:
    return self.rounds * self.buckets // 2

  def directions(self, width: int, layer: int = 0) -> np.ndarray:
    random = np.random.RandomState([self.seed, layer])
    shape = 1, self.num_directions, width
    return random.standard_normal(shape).astype(np.float32)

  def labels(
    self,
    q_BLHK: Array,
    k_BMGK: Array,
    directions_HDK: Array,
    start: Array = 0,
    segments: Segments = None,
  ) -> Array:
    import jax.numpy as jnp

    del (
      k_BMGK,
      start,
      segments,
    )  # the labels: the bucket of each query in each round
    half = self.buckets // 2

    def hash_(products_BHD):
      products = products_BHD.reshape(*products_BHD.shape[:2], -1, half)
      largest = jnp.abs(products).argmax(-1).astype(jnp.int32)
      product = jnp.take_along_axis(products, largest[..., None], -1)[..., 0]
      return jnp.where(product < 0, largest + half, largest)

    return _choose(q_BLHK, directions_HDK, hash_)

  def sets(
    self, labels_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    each = (labels_BHLC[..., r] for r in range(self.rounds))
    rounds = [_sort(x, self.window, segments_BL) for x in each]
    is_first = functools.reduce(lambda x, y: x & y, (x[2] for x in rounds))
    # One less as a query than as a key: the query itself is out of reach,
    # except in the first round if it has no earlier position in any.
    queries = [keys - 1 for _, keys, _ in rounds]
    queries[0] = queries[0] + is_first
    return tuple(
      Near(order, query, keys, self.window, reach=self.window)
      for (order, keys, _), query in zip(rounds, queries, strict=True)
    )


@register
@dataclasses.dataclass(frozen=True)
class Routing(Content):
  """The last `window` positions in the query's cluster, itself included.

  A query is in the cluster whose centroid is nearest to it by angle.

  Source: Roy et al. 2020, arXiv 2003.05997. They let a cluster take the
  positions nearest to its centroid, earlier and later ones. Here the keys of
  a query depend on its past only.

  Attributes:
    clusters: number of clusters. Their centroids are parameters, the
      directions of `labels`.
    window: number of keys.
  """

  clusters: int
  window: int

  shares = True

  def check(self, n: int) -> None:
    super().check(n)
    _check_coordinates(self, n, self.clusters)

  def most_keys(self, n: int) -> int:
    return min(n, self.window)

  def chances(self, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    # The query is one of the keys.
    others = _chances_by_distance(self.clusters, self.window - 1, n)[q - k]
    return np.where(q > k, others, q == k)

  @property
  def num_directions(self) -> int:
    return self.clusters

  def labels(
    self,
    q_BLHK: Array,
    k_BMGK: Array,
    directions_HDK: Array,
    start: Array = 0,
    segments: Segments = None,
  ) -> Array:
    import jax.numpy as jnp

    del k_BMGK, start, segments  # the label: the cluster of each query
    lengths = jnp.linalg.norm(directions_HDK, axis=-1, keepdims=True)
    centroids_HDK = directions_HDK / jnp.maximum(lengths, 1e-6)

    def nearest(products_BHD):
      return products_BHD.argmax(-1, keepdims=True).astype(jnp.int32)

    return _choose(q_BLHK, centroids_HDK, nearest)

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
  The query's own block is incomplete, and never chosen: use a union with
  `Block(size)` or `Local`. Nor is a block with keys of several segments.

  Source: Lu et al. 2025, arXiv 2502.13189, whose top-k blocks are those of
  `Block(size) | TopBlocks(size, k - 1)`.

  Attributes:
    size: keys in a block.
    num: number of blocks.
  """

  size: int
  num: int

  def most_keys(self, n: int) -> int:
    return self.size * min(self.num, max(0, n - 1) // self.size)

  def chances(self, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    past = q // self.size
    share = np.minimum(self.num, past) / np.maximum(past, 1)
    return np.where(k // self.size < past, share, 0)

  def labels(
    self,
    q_BLHK: Array,
    k_BMGK: Array,
    directions_HDK: Array,
    start: Array = 0,
    segments: Segments = None,
  ) -> Array:
    import jax
    import jax.numpy as jnp

    del directions_HDK  # the labels: the blocks of each query, -1 for none
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
    del segments_BL  # the labels know them
    return (Chosen(labels_BHLC, self.size),)


@register
@dataclasses.dataclass(frozen=True)
class AdaptiveSpan(Content):
  """The last keys, as far back as the learned span of the head.

  With a span of z positions, the key d positions before its query has a weight
  m = clip((ramp + z - d) / ramp, 0, 1), by which exp(score) is multiplied in
  the softmax: 1 up to d = z, 0 from d = z + ramp on, and between these a ramp,
  which gives the span its gradient.

  It can be combined with static patterns, whose pairs all have weight 1: a
  union takes the larger weight, an intersection the smaller.

  Source: Sukhbaatar et al. 2019, arXiv 1905.07799. Their released code attends
  to `max` keys at most, so that the ramp of the longest span is cut off. Here a
  query attends to up to `max + ramp` keys.

  Attributes:
    max: the longest span, in positions.
    ramp: positions over which the weight falls from 1 to 0.
  """

  max: int
  ramp: int = 32

  def __post_init__(self) -> None:
    super().__post_init__()
    self.support()  # which checks their sum

  def support(self) -> Pattern:
    return Local(self.max + self.ramp)

  def most_keys(self, n: int) -> int:
    return min(n, self.max + self.ramp)

  def chances(self, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    del n  # 1 for all pairs of the longest span
    return self.support().mask(q, k) * 1.0

  def check_within(self, pattern: Any) -> None:
    if pattern.contents() != (self,):
      raise ValueError(
        f"{shorten(pattern)}: a head can combine {shorten(self)} with static"
        " patterns only"
      )
    is_twice = isinstance(pattern, Union) and pattern.left.contents()
    if is_twice and pattern.right.contents():
      raise ValueError(
        f"{shorten(pattern)} has {shorten(self)} on both sides of |; write it"
        " once, as in AdaptiveSpan(...) & (A | B)"
      )
    if isinstance(pattern, Difference) and pattern.right.contents():
      raise ValueError(
        f"{shorten(pattern)}: the pairs of {shorten(self)} have weights, and"
        " cannot be taken from another pattern"
      )


@functools.lru_cache(maxsize=16)
def _chances_by_distance(num: int, window: int, n: int) -> np.ndarray:
  """Probability that a key is among the last `window` of the query's label.

  By its distance: float64 [n], 0 at 0. All labels are drawn from `num`.
  """
  distance = np.arange(n)
  if num == 1 or not window:
    return ((distance > 0) & (distance <= window)).astype(float)
  # The place of the first of these keys is negative binomially distributed.
  d = distance[window:]
  log_factorial = np.cumsum(np.log(np.maximum(distance, 1)))
  log_ways = log_factorial[d - 1] - log_factorial[d - window]
  log_ways = log_ways - log_factorial[window - 1 : window]
  first = np.zeros(n)
  log_chance = (d - window) * np.log1p(-1 / num) - window * np.log(num)
  first[d] = np.exp(log_ways + log_chance)
  is_out = np.cumsum(first) - first  # all of them are nearer than this key
  return np.where(distance > 0, (1 - is_out).clip(0) / num, 0)


def _products(spec: str, x: Array, y: Array) -> Array:
  """An einsum as exact as the device allows: its results are compared."""
  import jax.numpy as jnp

  return jnp.einsum(spec, x, y, precision="highest")


def _choose(
  q_BLHK: Array, directions_HDK: Array, choice: Callable[[Array], Array]
) -> Array:
  """The choice of each query, from its products [B, H, D]: [B, H, L, C]."""
  import jax
  import jax.numpy as jnp

  def of_position(q_BHK):
    if directions_HDK.shape[0] == 1:
      return choice(_products("bhk,dk->bhd", q_BHK, directions_HDK[0]))
    return choice(_products("bhk,hdk->bhd", q_BHK, directions_HDK))

  # A few positions at a time: there are far more products than choices.
  b, _, h, _ = q_BLHK.shape
  most = max(1, PRODUCTS // (b * h * directions_HDK.shape[1]))
  found = jax.lax.map(of_position, q_BLHK.swapaxes(0, 1), batch_size=most)
  return jnp.moveaxis(found, 0, 2)


def _sort(
  labels_BHL: Array, window: int, segments_BL: Array | None
) -> tuple[Array, Array, Array]:
  """(positions by label, coordinates, which are first of it): [B, H, L] each.

  Coordinates increase in the order of positions by label: by 1 within a label,
  and by more than `window` to the next. In segments, labels are not the same.
  """
  import jax
  import jax.numpy as jnp

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
  places = jnp.zeros_like(order)
  places = jnp.put_along_axis(places, order, i, axis=-1, inplace=False)
  is_first = jnp.take_along_axis(label != before, places, -1)
  if segments_BL is not None:
    labels_BHL = jnp.take_along_axis(label, places, -1)
  return order, places + labels_BHL * (window + 1), is_first


def _check_coordinates(pattern: Any, n: int, num_labels: int) -> None:
  largest = num_labels * max(n, pattern.window + 1) + n
  if largest >= intervals.LIMIT:
    raise ValueError(
      f"{shorten(pattern)}: coordinates of {n} positions with {num_labels}"
      f" labels reach {largest:,}, but they must fit in 32 bits: use fewer"
      " labels or a smaller window"
    )
