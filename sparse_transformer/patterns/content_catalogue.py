"""The catalogue of content-based patterns: one class each.

Axes: B batch, H heads, L positions, K width of queries and keys, D directions
or blocks, S positions of a block, R rounds.
"""

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sparse_transformer.patterns import intervals
from sparse_transformer.patterns.base import CONTENT, register
from sparse_transformer.patterns.checks import shorten
from sparse_transformer.patterns.content import (
  Array,
  Chosen,
  Content,
  Known,
  Near,
  jax,
  jnp,
)

MAX_ROUNDS = 64  # the most rounds of `LSH`: each compiles its own loops
# the most products of queries and directions computed at a time
PRODUCTS = 2**19


class _Grouped(Content):
  """A pattern that selects the last `window` keys in the query's group.

  Subclasses define `choose`, which finds the groups of a query from the dot
  products of the query with the directions.
  """

  window: int

  keys_are_queries = True

  @property
  def num_groups(self) -> int:
    return self.num_directions

  def choose(self, products_BHD: Array) -> Array:
    """Chooses groups from dot products with directions: int32 [B, H, R]."""
    raise NotImplementedError

  def check(self, n: int) -> None:
    super().check(n)
    # A bound of the largest coordinate, see `_sort`.
    largest = self.num_groups * max(n, self.window + 1) + n
    if largest >= intervals.LIMIT:
      raise ValueError(
        f"{shorten(self)}: coordinates of {n} positions reach {largest:,}, but"
        " they must fit in 32 bits: use fewer groups or a smaller window"
      )

  def find_buckets(self, known: Known) -> Array:
    directions_HDK = known.directions_HDK

    def choose_at(q_BHK):
      # Directions that all heads share need not be copied for each head.
      if directions_HDK.shape[0] == 1:
        products = _products("bhk,dk->bhd", q_BHK, directions_HDK[0])
      else:
        products = _products("bhk,hdk->bhd", q_BHK, directions_HDK)
      return self.choose(products)

    # Positions are processed in small batches, because there are far more
    # products than groups. If the batch size of queries is not known when
    # tracing, it counts as 1.
    b, _, h, _ = known.q_BLHK.shape
    batch = b if isinstance(b, int) else 1
    num_products = batch * h * directions_HDK.shape[1]
    groups_LBHR = jax.lax.map(
      choose_at,
      known.q_BLHK.swapaxes(0, 1),
      batch_size=max(1, PRODUCTS // num_products),
    )
    return jnp.moveaxis(groups_LBHR, 0, 2)


@register
@dataclasses.dataclass(frozen=True)
class LSH(_Grouped):
  """The `window` nearest earlier keys in the query's bucket, for each round.

  Each round projects a query onto `buckets // 2` random vectors and their
  negatives; the largest product determines the query's bucket. A query attends
  to the keys of all rounds, or only to itself if its buckets contain no earlier
  positions. Source: Kitaev et al. 2020, arXiv 2001.04451. In the paper, the
  sorted sequence is cut into chunks, so the keys of a query may depend on later
  positions.
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
    products = products_BHD.reshape(products_BHD.shape[:2] + (-1, half))

    # Find the largest product in magnitude. Its sign tells whether the bucket
    # is that of the vector or of its negative.
    largest = jnp.abs(products).argmax(-1).astype(jnp.int32)
    product = jnp.take_along_axis(products, largest[..., None], -1)[..., 0]
    return jnp.where(product < 0, largest + half, largest)

  def sets(
    self, buckets_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    """Returns one set per round: each query with earlier keys of its bucket.

    The coordinates within a bucket are consecutive, and the coordinates of
    different buckets are more than `window` apart. `Near` pairs a query with
    the keys whose coordinates are 0 to `window` - 1 below the query's
    coordinate.
    """
    rounds = [
      _sort(buckets_BHLC[..., r], self.window, segments_BL)
      for r in range(self.rounds)
    ]
    # Whether a query is the first position of its bucket in every round.
    is_alone = functools.reduce(operator.and_, (x.is_first for x in rounds))

    sets = []
    for r, (order, coordinates, _) in enumerate(rounds):
      # A position's coordinate as a query is one less than its coordinate as a
      # key, so that it sees only earlier positions. If the position is the
      # first of its bucket in every round, the two are equal in the first
      # round, so that it sees itself.
      as_query = coordinates - 1
      if r == 0:
        as_query = as_query + is_alone.astype(as_query.dtype)
      sets.append(
        Near(
          order=order,
          as_query=as_query,
          as_key=coordinates,
          window=self.window,
          reach=self.window,
        )
      )
    return tuple(sets)


@register
@dataclasses.dataclass(frozen=True)
class Routing(_Grouped):
  """The last `window` keys in the query's cluster, including the query itself.

  A query belongs to the cluster whose centroid is nearest to it by angle. The
  centroids are parameters of the network, which `attend` receives as the
  pattern's `directions`.
  Source: Roy et al. 2020, arXiv 2003.05997. In the paper, a cluster contains
    the positions nearest to its centroid, even if they come after the query.
  """

  clusters: int
  window: int

  is_learned = True

  def most_keys(self, n: int) -> int:
    return min(n, self.window)

  @property
  def num_directions(self) -> int:
    return self.clusters

  def find_buckets(self, known: Known) -> Array:
    # With centroids of unit length, the largest product belongs to the smallest
    # angle.
    lengths = jnp.linalg.norm(known.directions_HDK, axis=-1, keepdims=True)
    unit_HDK = known.directions_HDK / jnp.maximum(lengths, 1e-6)
    return super().find_buckets(known._replace(directions_HDK=unit_HDK))

  def choose(self, products_BHD: Array) -> Array:
    return products_BHD.argmax(-1, keepdims=True).astype(jnp.int32)

  def sets(
    self, buckets_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    order, coordinates, _ = _sort(
      buckets_BHLC[..., 0], self.window, segments_BL
    )
    # A query is in its own window, so its two coordinates are equal.
    return (
      Near(
        order=order,
        as_query=coordinates,
        as_key=coordinates,
        window=self.window,
        reach=self.window - 1,
      ),
    )


class _OfBlocks(Content):
  """A pattern that selects at most `num` past blocks of `size` keys."""

  size: int
  num: int

  def most_keys(self, n: int) -> int:
    return self.size * min(self.num, max(0, n - 1) // self.size)

  def own_blocks(self, known: Known) -> Array:
    """Returns the block that contains each query, int32 [L, 1].

    Only the blocks before the query's block are complete.
    """
    positions_L1 = known.start + jnp.arange(known.q_BLHK.shape[1])[:, None]
    return positions_L1 // self.size

  def sets(
    self, buckets_BHLC: Array, segments_BL: Array | None = None
  ) -> tuple[Near | Chosen, ...]:
    return (Chosen(buckets_BHLC, self.size),)


@register
@dataclasses.dataclass(frozen=True)
class Selected(_OfBlocks):
  """The past blocks of `size` keys that the caller selects for each query.

  The caller passes the indices of blocks as `directions`, int32 [batch, heads,
  positions, num]. The heads axis may also have size 1, or the number of KV
  heads. Block b contains the keys from b * size to (b + 1) * size - 1, and -1
  stands for no block. Indices that are out of range or repeated are ignored,
  and so are blocks that do not end before the query.
  """

  size: int
  num: int = 1

  blocks_from = "caller"

  def given_shape(
    self, batch: Any, heads: int, length: Any, width: int
  ) -> tuple[Any, ...]:
    return batch, heads, length, self.num

  def find_buckets(self, known: Known) -> Array:
    given_BHLC = known.directions_HDK
    is_past = given_BHLC < self.own_blocks(known)[None, None]
    past_BHLC = jnp.where(is_past, given_BHLC, -1).clip(-1)
    # After sorting, a repeated block follows itself, so its difference is 0;
    # the -1 of unused choices come first and have difference 0 too.
    blocks_BHLC = jnp.sort(past_BHLC, axis=-1)
    is_new = jnp.diff(blocks_BHLC, axis=-1, prepend=-1) > 0
    return jnp.where(is_new, blocks_BHLC, -1)


@register
@dataclasses.dataclass(frozen=True)
class TopBlocks(_OfBlocks):
  """The `num` past blocks of `size` keys with the best scores for each query.

  The score of a block is the dot product of the query and the mean of the
  block's keys. Two kinds of blocks are never chosen: blocks with keys of
  several segments, and the query's own block, because it is incomplete. To
  include the query's own block, use a union with `Block(size)` or `Local`.
  Source: Lu et al. 2025, arXiv 2502.13189, whose top-k blocks are `Block(size)
  | TopBlocks(size, k - 1)`.
  """

  size: int
  num: int

  def find_buckets(self, known: Known) -> Array:
    """Finds the best past blocks of each query; -1 marks unused choices."""
    b, num_queries, h, _ = known.q_BLHK.shape
    num_keys = known.k_BMGK.shape[1]
    # The block of the last position cannot be chosen, because no query comes
    # after it.
    num_blocks = (num_keys - 1) // self.size
    if not num_blocks:
      return jnp.full_like(known.q_BLHK, -1, jnp.int32, (b, h, num_queries, 1))

    # The score of a block is the product of a query with the block's mean key.
    # Query heads that share a KV head also share its means.
    keys_BDSGK = self._cut(known.k_BMGK, num_blocks)
    means_BGDK = keys_BDSGK.mean(2).swapaxes(1, 2)
    heads_of_key = h // means_BGDK.shape[1]
    means_BHDK = jnp.repeat(means_BGDK, heads_of_key, 1)
    scores_BHLD = _products("blhk,bhdk->bhld", known.q_BLHK, means_BHDK)

    # Only past blocks are allowed, because the query's own block is incomplete.
    blocks_1D = jnp.arange(num_blocks)[None]
    is_allowed_BLD = (blocks_1D < self.own_blocks(known))[None]
    if known.segments is not None:
      is_one_BLD = self._is_one_segment(known.segments, num_blocks)
      is_allowed_BLD = is_allowed_BLD & is_one_BLD

    # Early queries have fewer past blocks than they may choose. They get -1 for
    # the others.
    scores_BHLD = jnp.where(
      is_allowed_BLD[:, None],
      scores_BHLD,
      -jnp.inf,
    )
    num_chosen = min(self.num, num_blocks)
    best, blocks = jax.lax.top_k(scores_BHLD, num_chosen)
    blocks = jnp.where(best == -jnp.inf, -1, blocks)
    return blocks.astype(jnp.int32)

  def _is_one_segment(self, segments, num_blocks):
    """Returns whether all keys of each block are in each query's segment.

    Args:
      segments: segments of queries [B, L], and of keys [B, M].
      num_blocks: D, the number of blocks to choose from.

    Returns:
      Booleans [B, L, D].
    """
    query_segments_BL, key_segments_BM = segments
    segments_BDS = self._cut(key_segments_BM, num_blocks)
    first_BD1 = segments_BDS[..., :1]
    is_whole_BD = (segments_BDS == first_BD1).all(-1)

    # If all keys of a block are in one segment, the first key identifies it.
    is_same_BLD = query_segments_BL[..., None] == first_BD1.swapaxes(1, 2)
    return is_same_BLD & is_whole_BD[:, None]

  def _cut(self, x_BM, num_blocks):
    """Cuts keys [B, M, ...] into their first D blocks: [B, D, S, ...]."""
    x_BM = x_BM[:, : num_blocks * self.size]
    blocks = num_blocks, self.size
    return x_BM.reshape(x_BM.shape[:1] + blocks + x_BM.shape[2:])


def _products(spec, x, y):
  """Computes an einsum as exactly as the device allows.

  Keys are chosen by comparing the results, so larger rounding errors could
  change the choice.
  """
  return jnp.einsum(spec, x, y, precision="highest")


class _Sorted(NamedTuple):
  """Positions sorted by bucket; each array is int32 or bool [B, H, L]."""

  order: Array  # the positions
  # The coordinate of each position. Coordinates increase by 1 within a bucket,
  # and by more than `window` from one bucket to the next.
  coordinates: Array
  is_first: Array  # whether a position is the first in its bucket


def _sort(buckets_BHL, window, segments_BL):
  """Sorts positions by bucket and, if there are segments, by segment.

  Args:
    buckets_BHL: int32, counted from 0.
    window: the most keys that a query may have in its bucket.
    segments_BL: segments of positions, or None.

  Returns:
    A `_Sorted`: the order, in which the positions of each bucket are adjacent
    and increasing; the coordinate of each position; and whether each position
    is the first of its bucket.
  """
  n = buckets_BHL.shape[-1]
  positions = jnp.broadcast_to(
    jnp.arange(n, dtype=jnp.int32), buckets_BHL.shape
  )
  if segments_BL is None:
    # Each (bucket, position) is encoded as one integer, so that only one array
    # is sorted. `check` makes sure that the integers fit in 32 bits.
    ids = jnp.sort(buckets_BHL * n + positions)
    order = ids % n
    sorted_buckets = ids // n
  else:
    # Each segment of a bucket becomes a bucket of its own.
    segments = jnp.broadcast_to(segments_BL[:, None], buckets_BHL.shape)
    by_bucket, by_segment, order = jax.lax.sort(
      (buckets_BHL, segments, positions), num_keys=3
    )
    is_new = _differs(by_bucket) | _differs(by_segment)
    sorted_buckets = jnp.cumsum(is_new, axis=-1, dtype=jnp.int32)

  # The bucket of the previous place in the order; before the first place, a
  # smaller bucket than any.
  before = jnp.concatenate(
    [sorted_buckets[..., :1] - 1, sorted_buckets[..., :-1]], -1
  )

  # The inverse of the order maps positions to places in the order.
  invert = lambda order, i: jnp.zeros_like(order).at[order].set(i)
  places = jax.vmap(jax.vmap(invert))(order, positions)
  if segments_BL is not None:
    buckets_BHL = jnp.take_along_axis(sorted_buckets, places, -1)

  return _Sorted(
    order=order,
    coordinates=places + buckets_BHL * (window + 1),
    is_first=jnp.take_along_axis(sorted_buckets != before, places, -1),
  )


def _differs(x):
  """Returns whether each value differs from the previous one.

  The first value counts as equal.
  """
  return jnp.diff(x, axis=-1, prepend=x[..., :1]) != 0


# Type checkers understand only a literal `__all__`. Without one, they see all
# public names.
if not TYPE_CHECKING:
  __all__ = list(CONTENT)
