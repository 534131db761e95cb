"""Patterns whose keys follow from labels: buckets, clusters, chosen blocks.

R is the number of rounds; other axes are as in `content`. This module loads JAX
only where it runs.
"""

import dataclasses
import functools

import numpy as np

from sparse_transformer.patterns import intervals
from sparse_transformer.patterns.base import register
from sparse_transformer.patterns.checks import shorten
from sparse_transformer.patterns.content import Array, Chosen, Content, Near

MAX_ROUNDS = 64  # of `LSH`: each compiles separate loops
PRODUCTS = 2**19  # of queries and directions, that are computed at a time


class _Grouped(Content):
  """A pattern in which the last `window` positions of a group are keys.

  The group of a query follows from its products with directions.
  """

  window: int

  keys_are_queries = True

  @property
  def num_groups(self) -> int:
    """Number of groups."""
    raise NotImplementedError

  def normal(self, directions_HDK: Array) -> Array:
    """The directions that queries are projected onto."""
    return directions_HDK

  def choose(self, products_BHD: Array) -> Array:
    """The groups [B, H, R] of queries with these products."""
    raise NotImplementedError

  def check(self, n: int) -> None:
    super().check(n)
    largest = self.num_groups * max(n, self.window + 1) + n
    if largest >= intervals.LIMIT:
      raise ValueError(
        f"{shorten(self)}: coordinates of {n} positions with {self.num_groups}"
        f" labels reach {largest:,}, but they must fit in 32 bits: use fewer"
        " labels or a smaller window"
      )

  def labels(
    self,
    q_BLHK: Array,
    k_BMGK: Array,
    directions_HDK: Array,
    start: Array = 0,
    segments: tuple[Array, Array] | None = None,
  ) -> Array:
    import jax
    import jax.numpy as jnp

    del k_BMGK, start, segments
    directions_HDK = self.normal(directions_HDK)

    def of_position(q_BHK):
      if directions_HDK.shape[0] == 1:
        return _products("bhk,dk->bhd", q_BHK, directions_HDK[0])
      return _products("bhk,hdk->bhd", q_BHK, directions_HDK)

    # A few positions at a time: there are far more products than choices.
    b, _, h, _ = q_BLHK.shape
    found = jax.lax.map(
      lambda q_BHK: self.choose(of_position(q_BHK)),
      q_BLHK.swapaxes(0, 1),
      batch_size=max(1, PRODUCTS // (b * h * directions_HDK.shape[1])),
    )
    return jnp.moveaxis(found, 0, 2)


@register
@dataclasses.dataclass(frozen=True)
class LSH(_Grouped):
  """The last `window` earlier positions in the query's bucket of any round.

  A hash puts each query into one of `buckets` in each round: the largest of
  its products with `buckets // 2` random vectors and with their negatives. A
  query without earlier positions in its buckets attends to itself.

  Source: Kitaev et al. 2020, arXiv 2001.04451, where the chunks of a sorted
  sequence depend on later positions.
  """

  window: int
  buckets: int
  rounds: int = 1
  seed: int = 0

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.buckets % 2:
      raise ValueError(
        f"{shorten(self)}: buckets must be even, since each random vector"
        " makes two"
      )
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
    import jax.numpy as jnp

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
    queries[0] = queries[0] + is_first
    return tuple(
      Near(order, query, keys, self.window, reach=self.window)
      for (order, keys, _), query in zip(rounds, queries, strict=True)
    )


@register
@dataclasses.dataclass(frozen=True)
class Routing(_Grouped):
  """The last `window` positions in the query's cluster, itself included.

  A query is in the cluster whose centroid is nearest to it by angle.

  Centroids are parameters, the directions of `labels`.

  Source: Roy et al. 2020, arXiv 2003.05997, where a cluster takes the nearest
  positions, earlier and later ones.
  """

  clusters: int
  window: int

  def most_keys(self, n: int) -> int:
    return min(n, self.window)

  @property
  def num_directions(self) -> int:
    return self.clusters

  @property
  def num_groups(self) -> int:
    return self.clusters

  def normal(self, directions_HDK: Array) -> Array:
    import jax.numpy as jnp

    lengths = jnp.linalg.norm(directions_HDK, axis=-1, keepdims=True)
    return directions_HDK / jnp.maximum(lengths, 1e-6)

  def choose(self, products_BHD: Array) -> Array:
    import jax.numpy as jnp

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
  The query's own block is incomplete, and never chosen: use a union with
  `Block(size)` or `Local`. Nor is a block with keys of several segments.

  Source: Lu et al. 2025, arXiv 2502.13189, whose top-k blocks are those of
  `Block(size) | TopBlocks(size, k - 1)`.
  """

  size: int
  num: int

  def most_keys(self, n: int) -> int:
    return self.size * min(self.num, max(0, n - 1) // self.size)

  def labels(
    self,
    q_BLHK: Array,
    k_BMGK: Array,
    directions_HDK: Array,
    start: Array = 0,
    segments: tuple[Array, Array] | None = None,
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


def _products(spec: str, x: Array, y: Array) -> Array:
  """An einsum as exact as the device allows: its results are compared."""
  import jax.numpy as jnp

  return jnp.einsum(spec, x, y, precision="highest")


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
