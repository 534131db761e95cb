"""The interface between `attend` and its backends, which run plans."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from sparse_transformer.attention.orders import (
  NATURAL,
  STATIC as STATIC,
  Arrangement,
  Table as Table,
)
from sparse_transformer.patterns import Layout, Pattern

# Names for `jax.checkpoint_policies.save_only_these_names`. The backward pass
# needs these arrays besides queries, keys and values.
SAVED_NAMES = "attention_out", "attention_lse", "attention_buckets"

SMALLEST_TILE = 32  # positions

Axes = tuple[str, ...]  # names of axes of a mesh
Heads = tuple[int, ...]  # indices of heads


class Split(NamedTuple):
  """The mesh axes that split arrays [B, L, H, ...]."""

  sequences: Axes = ()
  positions: Axes = ()
  heads: Axes = ()
  # If the caller is within `jax.shard_map`, the axes along which it has already
  # split positions.
  within: Axes = ()

  @property
  def over_positions(self) -> Axes:
    """The mesh axes that split positions, here or in an outer `shard_map`."""
    return self.within or self.positions

  @property
  def spec(self) -> PartitionSpec:
    """The spec with which `jax.shard_map` splits arrays [B, L, H, ...]."""
    return PartitionSpec(
      self.sequences or None,
      self.positions or None,
      self.heads or None,
    )


@dataclasses.dataclass(frozen=True)
class Scores:
  """How scores are computed from products of queries and keys."""

  scale: float | None = None  # factor of the products; None for 1 / sqrt(K)
  softcap: float = 0.0  # c in c tanh(score / c); 0 for no soft cap

  def factor(self, width: int) -> float:
    """Returns the factor for queries and keys of width K."""
    return 1 / math.sqrt(width) if self.scale is None else self.scale


class Features(NamedTuple):
  """Features of a request that a backend may not support."""

  segments: bool
  softcap: bool
  sinks: bool
  bias: bool
  lse: bool
  split_positions: bool
  symbolic_batch: bool
  mixed_dtypes: bool

  @property
  def asked(self) -> list[str]:
    """The names of the requested features, in words."""
    asked = [name for name, is_asked in self._asdict().items() if is_asked]
    return [name.replace("_", " ") for name in asked]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """A call of `attend`, described by everything that a backend may use.

  `attend` makes one for the entire call. Each device then gets a request for
  its own sequences and heads. The argument `first` of `attend` is not part of a
  request, because it may be traced; see `vjp`.
  """

  patterns: tuple[Pattern, ...]  # one for each query head
  batch: int | None  # number of sequences, B; None if it is symbolic
  length: int  # positions of a sequence on all devices, n
  num_key_heads: int  # number of KV heads, G
  qk_width: int  # width of a head's queries and keys, K
  value_width: int  # width of a head's values, E
  dtype: str  # dtype of queries and keys
  value_dtype: str
  platform: str = ""  # one of `platforms.PLATFORMS`, or "" for any other
  tile: int = 0  # positions on a side of a tile; 0 lets the backend choose
  scores: Scores = Scores()
  split: Split = Split()
  segments: bool = False  # whether queries attend only within their segments
  sinks: bool = False  # whether heads have sinks
  bias: bool = False  # whether scores have a bias by distance
  lse: bool = False  # whether the log-sum-exp is also returned

  @property
  def num_heads(self) -> int:
    """The number of query heads, H."""
    return len(self.patterns)

  @property
  def group(self) -> int:
    """The number of query heads that share a KV head."""
    return self.num_heads // self.num_key_heads

  @property
  def features(self) -> Features:
    """Which features the request needs."""
    return Features(
      segments=self.segments,
      softcap=self.scores.softcap > 0,
      sinks=self.sinks,
      bias=self.bias,
      lse=self.lse,
      split_positions=self.split.over_positions != (),
      symbolic_batch=self.batch is None,
      mixed_dtypes=self.dtype != self.value_dtype,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """How a backend runs one part of a pattern, or all patterns at once."""

  # A `Pattern` whose `mask` is applied to the original positions in partial
  # tiles. It is bound to arrays if it is content-based. None if the tables
  # contain the pairs of partial tiles.
  pattern: Any = dataclasses.field(metadata=STATIC)
  tile: int = dataclasses.field(metadata=STATIC)  # positions on a side
  tables: Any  # a pytree defined by the backend: the tiles and their order
  # The orders in which queries and keys are cut into tiles.
  queries: Arrangement = NATURAL
  keys: Arrangement = NATURAL
  scores: Scores = dataclasses.field(default=Scores(), metadata=STATIC)
  # Whether the results are final, so that they may be rounded: no results of
  # other plans or devices are added to them.
  is_whole: bool = dataclasses.field(default=False, metadata=STATIC)


Plans = Sequence[tuple[Plan, Heads]]  # plans with their heads


class Unsupported(NotImplementedError, ValueError):
  """The backend cannot run this case, but another backend may."""


class Queries(NamedTuple):
  """Queries [B, L, H, ...], or tiles of queries; all but q are optional."""

  q: jax.Array  # the queries
  # int32 [B, L, 1], the segments of queries. A query attends only to keys of
  # the same segment.
  segments: jax.Array | None = None
  # For the backward pass only: the gradients of the outputs; the log-sum-exp
  # over all pairs, which must be finite; and delta = dout · out - dlse, where
  # dlse are the gradients of the log-sum-exp.
  dout: Any = None
  lse: Any = None
  delta: Any = None


class Keys(NamedTuple):
  """Keys and values [B, M, G, ...], or tiles of these."""

  k: jax.Array
  v: jax.Array
  segments: jax.Array | None = None  # int32 [B, M, 1]


class Runner(Protocol):
  """Runs attention for one plan at a time."""

  @abc.abstractmethod
  def forward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, jax.Array]:
    """Returns (out_BLHE, lse_BLH) over a plan's pairs within segments.

    All arrays are in the orders of the plan. A query without keys gets output 0
    and log-sum-exp -inf.
    """

  @abc.abstractmethod
  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, ...]:
    """Returns the gradients (dq_BLHK, dk_BMGK, dv_BMGE, ...) of a plan.

    The weights are p = exp(s - lse), where s are the scores. The gradients of
    the scores are ds = p * (dout v^T - delta). If there is a bias, its gradient
    is the last result.
    """


class Backend(Runner, Protocol):
  """The base class of backends, which make plans for a request and run them."""

  # The smallest tile that may be chosen if positions are split over devices.
  smallest_tile: int = SMALLEST_TILE

  @abc.abstractmethod
  def unsupported(self, request: Request) -> str | None:
    """Returns why a request cannot run, or None if it can.

    The returned text is used as the end of an error message.
    """

  @abc.abstractmethod
  def tile_size(self, part: Pattern, request: Request) -> int:
    """Returns the tile size for a part of one of the request's patterns.

    This is `request.tile`. If `request.tile` is 0, the backend chooses a size.
    """

  @abc.abstractmethod
  def plans(self, request: Request) -> Plans:
    """Returns plans that together cover all pairs of the request's patterns."""

  def device_tables(
    self, part: Pattern, layouts: Sequence[Layout], request: Request
  ) -> list[Any]:
    """Returns the tables of a part for each device, all with equal shapes.

    This is needed only if positions are split over devices.

    Args:
      part: the part of a pattern.
      layouts: the tiles of each device, in the device's own orders. These
        orders, `query_order` and `key_order`, fill whole tiles and are padded
        with -1.
      request: a request for the heads whose patterns include this part.

    Raises:
      Unsupported: this backend does not support positions split over devices.
    """
    raise Unsupported(
      "the backend cannot split positions over devices; use another one"
    )


def bias_at(bias_HD: jax.Array, distances: Any) -> jax.Array:
  """Returns the bias [H, ...] at distances q - k.

  Distance 0 is in the middle of `bias_HD`.
  """
  middle = bias_HD.shape[1] // 2
  return bias_HD[:, middle + distances]


def fit_tile(tile: int, n: int) -> int:
  """Returns `tile`, or a smaller tile size if n positions fit into it.

  The result is at least 32, unless `tile` itself is smaller.
  """
  return min(tile, max(SMALLEST_TILE, 1 << (n - 1).bit_length()))


def name_saved(*results: jax.Array) -> tuple[jax.Array, ...]:
  """Names (out, lse) by `SAVED_NAMES`, for rematerialization."""
  return tuple(map(checkpoint_name, results, SAVED_NAMES))
