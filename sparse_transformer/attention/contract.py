"""The contract between `attend` and its executors.

An executor runs plans, each of which covers some of the pairs: those of one
part of a pattern, in the part's own orders of positions, or all of them. It is
a module, or any object, with the methods of `Executor`. All that it needs to
know about the pairs is in a `Plan`, whose tables are arrays: constants on the
host for a fixed pattern, or traced arrays, such as arguments of a jitted
function or tables indexed by a traced number.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.patterns import Layout, Pattern

# What the backward pass needs besides queries, keys and values: the results,
# and the labels by which patterns followed the content. These names can be
# given to `jax.checkpoint_policies.save_only_these_names`.
SAVED_NAMES = "attention_out", "attention_lse", "attention_labels"

# Metadata of the fields of a pytree that are not arrays.
STATIC = dict(static=True)

Axes = tuple[str, ...]  # of a mesh

# A table of a plan: a constant on the host, or a traced array.
Table = np.ndarray | jax.Array
Heads = tuple[int, ...] | None  # None: all of them


@dataclasses.dataclass(frozen=True)
class Case:
  """What an executor is asked to run."""

  batch: int  # number of sequences, B
  length: int  # positions in a sequence, n = L = M
  num_heads: int  # number of query heads, H
  qk_width: int  # width of a head's queries and keys, K
  value_width: int  # width of a head's values, E
  dtype: str  # dtype of queries and keys
  platform: str = ""  # of `registry.PLATFORMS`, or "" for any other
  tile: int = 0  # positions on a side of a tile that are asked for; 0 to choose
  num_key_heads: int = 0  # heads of keys and values, G; 0 for as many

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
    """The factor of products of queries and keys of a width."""
    return 1 / math.sqrt(width) if self.scale is None else self.scale


class Arrangement(abc.ABC):
  """An order of positions: `Order`, or one of those in `exchange`.

  Its `positions` are int32 [places], the position at each place, -1 for
  padding.
  """

  @abc.abstractmethod
  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, L, ...] in this order; padded places hold finite values."""

  @abc.abstractmethod
  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Undoes `arrange`; a position without a place gets 0."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Order(Arrangement):
  """An order of positions on one device."""

  positions: Table  # int32 [places], the position at each place, -1 for padding
  # int32 [n], the place of each position, `len(positions)` for none.
  places: Table
  # Whether this is the natural order, without padding.
  is_natural: bool = dataclasses.field(metadata=STATIC)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if self.is_natural:
      return arrays
    return tuple(jnp.take(x, self.positions.clip(0), axis=1) for x in arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if self.is_natural:
      return arrays
    take = functools.partial(jnp.take, axis=1, mode="fill", fill_value=0)
    return tuple(take(x, self.places) for x in arrays)


def make_order(order: np.ndarray, num_places: int) -> Order:
  """The first places of a permutation, padded where it has fewer."""
  n, kept = len(order), order[:num_places]
  positions = np.full(num_places, -1, np.int32)
  positions[: len(kept)] = kept
  places = np.full(n, num_places, np.int32)
  places[kept] = np.arange(len(kept))
  is_natural = np.array_equal(positions, np.arange(n))
  return Order(positions, places, is_natural)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Slice(Arrangement):
  """An order of some consecutive positions."""

  order: Order  # of their numbers, counted from the first
  first: jax.Array  # int32, the first position

  @property
  def positions(self) -> jax.Array:
    at = jnp.asarray(self.order.positions)
    return jnp.where(at < 0, -1, self.first + at)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return self.order.arrange(*arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return self.order.restore(*arrays)


# Arranges nothing, at any length; its positions are never read.
NATURAL = make_order(np.arange(0), 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """How an executor runs one part of a pattern, or all parts of all heads."""

  # A `Pattern` whose `mask`, on original positions, is applied in partial
  # tiles, bound to arrays if it follows the content; None if the tables hold
  # the pairs of partial tiles.
  pattern: Any = dataclasses.field(metadata=STATIC)
  tile: int = dataclasses.field(metadata=STATIC)  # positions on a side
  tables: Any  # a pytree of the executor's: which tiles it processes, and when
  # The orders in which queries and keys are cut into tiles.
  queries: Arrangement = NATURAL
  keys: Arrangement = NATURAL
  scores: Scores = dataclasses.field(default=Scores(), metadata=STATIC)


# Plans, each with its heads.
Plans = Sequence[tuple[Plan, Heads]]


def index_of(heads: Heads) -> slice | np.ndarray:
  """An index of heads; a slice for all of them, so that nothing is copied."""
  return slice(None) if heads is None else np.array(heads)


class Unsupported(NotImplementedError, ValueError):
  """A backend cannot run a case that another backend may be able to run."""


class Queries(NamedTuple):
  """Queries [B, L, H, ...], or tiles of them; all but q may be missing."""

  q: jax.Array  # the queries
  # int32 [B, L, 1], their segments, whose keys are the only ones they have.
  segments: jax.Array | None = None
  # In the backward pass: the gradients of their outputs, their log-sum-exp over
  # all pairs, which is finite, and the products of dout and out, less the
  # gradients of lse.
  dout: Any = None
  lse: Any = None
  delta: Any = None


class Keys(NamedTuple):
  """Keys and their values [B, M, G, ...], or tiles of them."""

  k: jax.Array
  v: jax.Array
  segments: jax.Array | None = None  # int32 [B, M, 1]


def segments_of(queries: Queries, keys: Keys) -> tuple[Any, Any] | None:
  """The segments of queries [B, L] and of keys [B, M], if there are any."""
  if queries.segments is None or keys.segments is None:
    return None
  return queries.segments[..., 0], keys.segments[..., 0]


def apply(function: Callable[..., Any], arrays: Any) -> Any:
  """function(*arrays) of those in a pytree, in the same structure."""
  leaves, structure = jax.tree.flatten(arrays)
  return jax.tree.unflatten(structure, function(*leaves))


class Executor(Protocol):
  """Runs attention, plan by plan.

  G divides H: query head h reads key head h // (H // G).
  """

  def unsupported(self, case: Case) -> str | None:
    """Why a case cannot run, as the end of an error message; None if it can."""

  def tile_size(self, part: Pattern, case: Case) -> int:
    """The tile of a part that runs alone: `case.tile`, or its choice for 0.

    See also `registry.common_tile`.
    """

  def plans(self, patterns: tuple[Pattern, ...], case: Case) -> Plans:
    """Plans that together cover the pairs of all heads.

    Args:
      patterns: one per head.
      case: what is run, in tiles of `case.tile` unless that is 0.
    """

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: Case
  ) -> list[Any]:
    """The tables with which devices share a part, all of the same shapes.

    An executor without this method cannot run where positions are split.

    Args:
      part: one of a pattern's parts.
      layouts: the tiles of each device, by place on it: positions in
        `query_order` and `key_order` are -1 for padding, and fill whole tiles.
      case: what is run, with the heads that have this part.
    """

  def forward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, jax.Array]:
    """(out_BLHE, lse_BLH) over the pairs of a plan within segments.

    Arguments and results are in the orders of the plan. A query without keys
    gets output 0 and log-sum-exp -inf.
    """

  def backward(
    self, plan: Plan, queries: Queries, keys: Keys
  ) -> tuple[jax.Array, ...]:
    """(dq_BLHK, dk_BMGK, dv_BMGE, ...) of the pairs of a plan.

    With s the scores: p = exp(s - lse) and ds = p * (dout v^T - delta).
    Further results are the gradients of what the tables of a plan were made
    from, such as spans.
    """


def make_case(q_BLHK: jax.Array, v_BMGE: jax.Array, tile: int = 0) -> Case:
  """The case of queries and values, on no particular platform."""
  batch, _, num_heads, width = q_BLHK.shape
  _, length, num_key_heads, value_width = v_BMGE.shape
  return Case(
    batch,
    length,
    num_heads,
    width,
    value_width,
    str(q_BLHK.dtype),
    tile=tile,
    num_key_heads=num_key_heads,
  )


def key_heads(heads: Heads, group: int) -> Heads:
  """The key heads of some query heads, each for equally many in a row.

  Query head h has key head h // group. A key head occurs several times if only
  some of its query heads are among them.

  >>> key_heads((0, 1, 2, 3), 2), key_heads((0, 1, 2), 2)
  ((0, 1), (0, 0, 1))
  """
  if heads is None or group == 1:
    return heads
  of_each = np.array(heads) // group
  for size in range(group, 0, -1):
    if len(heads) % size == 0:
      rows = of_each.reshape(-1, size)
      if (rows == rows[:, :1]).all():
        break
  return tuple(rows[:, 0].tolist())


def units(patterns: tuple[Pattern, ...], case: Case) -> tuple[Pattern, ...]:
  """The pattern of each unit: query heads of a key head with equal patterns."""
  for size in range(case.group, 0, -1):
    if case.group % size == 0:
      found = patterns[::size]
      if all(patterns[i] == found[i // size] for i in range(len(patterns))):
        break
  return found


def number(size: Any) -> int:
  """A size to plan for: 1 for a symbolic one, as `jax.export` may have."""
  return size if isinstance(size, int) else 1


def nothing_unsupported(case: Case) -> None:
  """The `unsupported` of executors that can run every case."""
  del case


@functools.lru_cache(maxsize=256)
def heads_of_parts(
  patterns: tuple[Pattern, ...], n: int
) -> tuple[tuple[Pattern, Heads], ...]:
  """Each distinct part that has pairs, with the heads that use it."""
  by_part = group_heads([pattern.parts() for pattern in patterns])
  return tuple(item for item in by_part.items() if item[0].pairs(n))


def group_heads(
  patterns_H: Sequence[Sequence[Pattern]],
) -> dict[Pattern, Heads]:
  """Each distinct pattern, with the heads that have it among theirs."""
  heads: dict[Pattern, list[int]] = {}
  for head, patterns in enumerate(patterns_H):
    for pattern in patterns:
      heads.setdefault(pattern, []).append(head)
  everyone = list(range(len(patterns_H)))
  return {
    pattern: None if found == everyone else tuple(found)
    for pattern, found in heads.items()
  }


def make_plan(layout: Layout, pattern: Pattern, n: int, tables: Any) -> Plan:
  """A `Plan` whose orders are those of a layout.

  Keys after the last tile that is processed are left out where they are at
  least half of all; a few do not pay for a copy that pads their gradients.
  """
  num_rows = -(-n // layout.tile)
  num_cols = max(layout.cols, default=0) + 1
  if num_cols > num_rows // 2:
    num_cols = num_rows
  return Plan(
    pattern,
    layout.tile,
    tables,
    make_order(layout.query_order, num_rows * layout.tile),
    make_order(layout.key_order, num_cols * layout.tile),
  )


def name_saved(
  out_BLHE: jax.Array, lse_BLH: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The same arrays under `SAVED_NAMES`, for rematerialization."""
  out_name, lse_name, _ = SAVED_NAMES
  return checkpoint_name(out_BLHE, out_name), checkpoint_name(lse_BLH, lse_name)


def apply_at_once(
  function: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
  """function(x) of each array; those of the same dtype and rows are joined.

  A gather then finds each row once, which takes longer than reading it, and
  devices send one message instead of several.

  Args:
    function: keeps the last axis, and treats all places along it alike.
    arrays: one with a number per row, such as lse_BLH beside q_BLHK, lacks the
      last axis.
  """
  ndim = max(x.ndim for x in arrays)
  wide = [x if x.ndim == ndim else x[..., None] for x in arrays]
  results: dict[int, jax.Array] = {}
  kinds = [(x.dtype, x.shape[:-1]) for x in wide]
  for kind in dict.fromkeys(kinds):
    chosen = [i for i, other in enumerate(kinds) if other == kind]
    ends = np.cumsum([wide[i].shape[-1] for i in chosen])[:-1]
    found = function(jnp.concatenate([wide[i] for i in chosen], -1))
    results |= dict(zip(chosen, jnp.split(found, ends, -1), strict=True))
  return tuple(
    results[i] if x.ndim == ndim else results[i][..., 0]
    for i, x in enumerate(arrays)
  )
