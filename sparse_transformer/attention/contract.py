"""The contract between `attend` and its backends, which run plans."""

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

# For `jax.checkpoint_policies.save_only_these_names`: what the backward pass
# needs besides queries, keys and values.
SAVED_NAMES = "attention_out", "attention_lse", "attention_buckets"

SMALLEST_TILE = 32  # positions

Axes = tuple[str, ...]  # of a mesh
Heads = tuple[int, ...]  # numbers of heads


class Split(NamedTuple):
  """The axes of the mesh that split arrays [B, L, H, ...]."""

  sequences: Axes = ()
  positions: Axes = ()
  heads: Axes = ()
  # Those that have divided positions, if the caller is within `jax.shard_map`.
  within: Axes = ()

  @property
  def over_positions(self) -> Axes:
    """The axes that divide positions, here or around the caller."""
    return self.within or self.positions

  @property
  def spec(self) -> PartitionSpec:
    """How `jax.shard_map` splits arrays [B, L, H, ...]."""
    return PartitionSpec(
      self.sequences or None,
      self.positions or None,
      self.heads or None,
    )


@dataclasses.dataclass(frozen=True)
class Scores:
  """How scores follow from products of queries and keys."""

  scale: float | None = None  # their factor; None for 1 / sqrt(K)
  softcap: float = 0.0  # c, for c tanh(score / c); 0 for none

  def factor(self, width: int) -> float:
    """The factor for a width of queries and keys."""
    return 1 / math.sqrt(width) if self.scale is None else self.scale


class Features(NamedTuple):
  """Parts of a request that a backend may lack."""

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
    """The names of those that are asked for, in words."""
    asked = [name for name, is_asked in self._asdict().items() if is_asked]
    return [name.replace("_", " ") for name in asked]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """What `attend` was asked for: all that a backend may look at.

  `attend` makes one. Each device gets one of its own sequences and heads.
  `first` is not part of it, since it may be traced: see `vjp`.
  """

  patterns: tuple[Pattern, ...]  # one for each query head
  batch: int | None  # number of sequences, B; None if it is symbolic
  length: int  # positions of a sequence on all devices, n
  num_key_heads: int  # heads of keys and values, G
  qk_width: int  # width of a head's queries and keys, K
  value_width: int  # width of a head's values, E
  dtype: str  # of queries and keys
  value_dtype: str
  platform: str = ""  # of `platforms.PLATFORMS`, or "" for any other
  tile: int = 0  # positions on a side of a tile; 0 lets the backend choose
  scores: Scores = Scores()
  split: Split = Split()
  segments: bool = False  # whether pairs are within segments only
  sinks: bool = False  # whether heads have sinks
  bias: bool = False  # whether scores have a bias by distance
  lse: bool = False  # whether the log-sum-exp is also returned

  @property
  def num_heads(self) -> int:
    """The number of query heads, H."""
    return len(self.patterns)

  @property
  def group(self) -> int:
    """The number of query heads that share a key head."""
    return self.num_heads // self.num_key_heads

  @property
  def features(self) -> Features:
    """Which features are asked for."""
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
  """How a backend runs one part of a pattern, or all parts of all heads."""

  # A `Pattern` whose `mask`, on original positions, is applied in partial
  # tiles, bound to arrays if it follows the content; None if the tables have
  # these pairs.
  pattern: Any = dataclasses.field(metadata=STATIC)
  tile: int = dataclasses.field(metadata=STATIC)  # positions on a side
  tables: Any  # a pytree of the backend's: which tiles it processes, and when
  # The orders in which queries and keys are cut into tiles.
  queries: Arrangement = NATURAL
  keys: Arrangement = NATURAL
  scores: Scores = dataclasses.field(default=Scores(), metadata=STATIC)
  # Whether nothing is added to its results, so that they may be rounded.
  is_whole: bool = dataclasses.field(default=False, metadata=STATIC)


Plans = Sequence[tuple[Plan, Heads]]  # each with its heads


class Unsupported(NotImplementedError, ValueError):
  """A backend cannot run a case that another backend may be able to run."""


class Queries(NamedTuple):
  """Queries [B, L, H, ...], or tiles of them; all but q may be missing."""

  q: jax.Array  # the queries
  # int32 [B, L, 1], their segments, whose keys are the only ones they have.
  segments: jax.Array | None = None
  # In the backward pass: the gradients of their outputs, their log-sum-exp over
  # all pairs, which is finite, and dout · out less the gradients of lse.
  dout: Any = None
  lse: Any = None
  delta: Any = None


class Keys(NamedTuple):
  """Keys and their values [B, M, G, ...], or tiles of them."""

  k: jax.Array
  v: jax.Array
  segments: jax.Array | None = None  # int32 [B, M, 1]


class Runner(Protocol):
  """Runs attention, plan by plan."""

  @abc.abstractmethod
  def forward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan within segments.

    All arrays are in its orders. A query without keys gets 0, -inf.
    """

  @abc.abstractmethod
  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, ...]:
    """(dq_BLHK, dk_BMGK, dv_BMGE, ...) of the pairs of a plan.

    With s the scores: p = exp(s - lse) and ds = p * (dout v^T - delta). The
    gradient of a bias follows, if there is one.
    """


class Backend(Runner, Protocol):
  """Makes plans of a request, and runs them; a base class of backends."""

  # The smallest tile to choose where positions are split over devices.
  smallest_tile: int = SMALLEST_TILE

  @abc.abstractmethod
  def unsupported(self, request: Request) -> str | None:
    """Why a request cannot run, which ends an error message; None if it can."""

  @abc.abstractmethod
  def tile_size(self, part: Pattern, request: Request) -> int:
    """The tile of a part that runs with the request's patterns.

    It is `request.tile` or, if that is 0, a choice.
    """

  @abc.abstractmethod
  def plans(self, request: Request) -> Plans:
    """Plans that together cover the pairs of the request's patterns."""

  def device_tables(
    self, part: Pattern, layouts: Sequence[Layout], request: Request
  ) -> list[Any]:
    """The tables of a part for each device, all of the same shapes.

    Needed only where positions are split.

    Args:
      part: the part of a pattern.
      layouts: the tiles of each device, by place on it. Positions in
        `query_order` and `key_order` are -1 for padding, and fill whole tiles.
      request: its heads are those with this part.

    Raises:
      Unsupported: this backend cannot run where positions are split.
    """
    raise Unsupported(
      "the backend cannot split positions over devices; use another one"
    )


def bias_at(bias_HD: jax.Array, distances: Any) -> jax.Array:
  """The bias [H, ...] at distances q - k, 0 in the middle of the array."""
  middle = bias_HD.shape[1] // 2
  return bias_HD[:, middle + distances]


def fit_tile(tile: int, n: int) -> int:
  """The tile, or a smaller one, of at least 32, that n positions fit in."""
  return min(tile, max(SMALLEST_TILE, 1 << (n - 1).bit_length()))


def name_saved(*results: jax.Array) -> tuple[jax.Array, ...]:
  """(out, lse) under `SAVED_NAMES`, for rematerialization."""
  return tuple(map(checkpoint_name, results, SAVED_NAMES))
