"""The contract between `attend` and its executors, which run plans."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention.orders import (
  NATURAL,
  STATIC as STATIC,
  Arrangement,
  Table as Table,
)
from sparse_transformer.patterns import Layout, Pattern

# For `jax.checkpoint_policies.save_only_these_names`: what the backward pass
# needs besides queries, keys and values.
SAVED_NAMES = "attention_out", "attention_lse", "attention_labels"

Axes = tuple[str, ...]  # of a mesh
Heads = tuple[int, ...] | None  # None: all of them
# Of `Case.others`, what no kernel has.
NOT_IN_KERNELS = {"values of another dtype", "a symbolic batch"}


@dataclasses.dataclass(frozen=True)
class Case:
  """What an executor is asked to run."""

  batch: int  # number of sequences, B
  length: int  # positions in a sequence, n = L = M
  num_heads: int  # number of query heads, H
  qk_width: int  # width of a head's queries and keys, K
  value_width: int  # width of a head's values, E
  dtype: str  # dtype of queries and keys
  platform: str = ""  # of `platforms.PLATFORMS`, or "" for any other
  tile: int = 0  # positions on a side of a tile that are asked for; 0 to choose
  num_key_heads: int = 0  # heads of keys and values, G; 0 for as many
  patterns: tuple[Pattern, ...] = ()  # one for each head, if they are known
  others: tuple[str, ...] = ()  # what else is asked for, see `others_of`

  @property
  def group(self) -> int:
    """Query heads that share a key head."""
    return self.num_heads // (self.num_key_heads or self.num_heads)


@dataclasses.dataclass(frozen=True)
class Scores:
  """How scores follow from products of queries and keys."""

  scale: float | None = None  # their factor; None for 1 / sqrt(K)
  softcap: float = 0.0  # c, for c tanh(score / c); 0 for none

  def factor(self, width: int) -> float:
    """The factor for a width of queries and keys."""
    return 1 / math.sqrt(width) if self.scale is None else self.scale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """How an executor runs one part of a pattern, or all parts of all heads."""

  # A `Pattern` whose `mask`, on original positions, is applied in partial
  # tiles, bound to arrays if it follows the content; None if the tables have
  # these pairs.
  pattern: Any = dataclasses.field(metadata=STATIC)
  tile: int = dataclasses.field(metadata=STATIC)  # positions on a side
  tables: Any  # a pytree of the executor's: which tiles it processes, and when
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


class Executor(Protocol):
  """Runs attention, plan by plan."""

  def unsupported(self, case: Case) -> str | None:
    """Why a case cannot run, as the end of an error message; None if it can."""

  def tile_size(self, part: Pattern, case: Case) -> int:
    """The tile of a part that runs alone: `case.tile`, or if 0, a choice."""

  def plans(self, patterns: tuple[Pattern, ...], case: Case) -> Plans:
    """Plans that together cover the pairs of heads with these patterns."""

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: Case
  ) -> list[Any]:
    """The tables with which devices share a part, all of the same shapes.

    Needed only where positions are split. The layouts are the tiles of each
    device, by place on it: positions in `query_order` and `key_order` are -1
    for padding, and fill whole tiles. The case has the heads with this part.
    """
    raise Unsupported("it cannot run where positions are split")

  def forward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan within segments.

    All arrays are in its orders. A query without keys gets 0, -inf.
    """

  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, ...]:
    """(dq_BLHK, dk_BMGK, dv_BMGE, ...) of the pairs of a plan.

    With s the scores: p = exp(s - lse) and ds = p * (dout v^T - delta). Further
    results are gradients of what its tables were made from, such as spans.
    """


def make_case(q_BLHK: jax.Array, v_BMGE: jax.Array, **fields: Any) -> Case:
  """The case of queries and values, with other fields."""
  batch, _, num_heads, width = q_BLHK.shape
  _, length, num_key_heads, value_width = v_BMGE.shape
  sizes = batch, length, num_heads, width, value_width
  fields |= dict(dtype=str(q_BLHK.dtype), num_key_heads=num_key_heads)
  return Case(*sizes, **fields)


def others_of(**asked: Any) -> tuple[str, ...]:
  """What else is asked for, in words: the names of what is not false."""
  return tuple(name.replace("_", " ") for name in asked if asked[name])


def number(size: Any) -> int:
  """A size to plan for: 1 for a symbolic one, as `jax.export` may have."""
  return size if isinstance(size, int) else 1


def fit_tile(tile: int, n: int) -> int:
  """The tile, or a smaller one, of at least 32, that n positions fit in."""
  return min(tile, max(32, 1 << (n - 1).bit_length()))


def name_saved(*results: jax.Array) -> tuple[jax.Array, ...]:
  """(out, lse) under `SAVED_NAMES`, for rematerialization."""
  return tuple(map(checkpoint_name, results, SAVED_NAMES))
