"""The backends in plain XLA, which loop over tiles of queries and keys.

On CPUs, steps are small, so that their scores stay in cache; on accelerators,
steps are large.

Axes: A tiles of queries in a group; C tiles of keys that each tile of queries
  meets in a step. The R query heads that share a KV head are joined into the
  rows of one tile, so that keys are read once for all R heads. Tiles of queries
  therefore have shape [A, B, G, R T, ...].
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.heads import group_heads, heads_of_parts
from sparse_transformer.attention.orders import make_order, orders_of
from sparse_transformer.patterns import Layout, Pattern, analysis

# Positions in a tile of queries, and in a tile of keys, for slices of queries.
SLICE_TILE, SLICE_KEYS = 64, 256
# sizes with more tiles are not tried, except the largest size
MAX_LAID_OUT = 2**20
# The most tiles of keys in a step, for one tile of queries and for all in a
# group. Each adds instructions to the program, whose size must not grow with n.
MAX_SPAN, MAX_TILES = 8, 32
# The overhead of a loop step, and the overhead of a tile of keys outside a
# loop, in units of the cost of one score. They were fitted to steps of 64 x 64
# to 256 x 512 on 2 cores, with jax 0.10.2 and 0.12.0.
STEP_COST, TILE_COST = 10_000, 1_300
# of the steps, since all rows of a group take as many as the longest
MAX_WASTE = 1 / 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepTables:
  """The steps of one part, as int32 tables.

  Group i has the steps from first[i] to first[i + 1] - 1. In each step, each of
  the A tiles of queries in the group meets C tiles of keys.
  """

  first: contract.Table  # [groups + 1], the first step of each group
  cols: contract.Table  # [steps, A, C], tiles of keys, padded with -1
  # Whether every group has exactly one step.
  single: bool = dataclasses.field(metadata=contract.STATIC)
  # The number of keys in a tile, if it differs from the number of queries; else
  # 0.
  num_keys: int = dataclasses.field(default=0, metadata=contract.STATIC)


@dataclasses.dataclass(frozen=True)
class Xla(contract.Backend):
  """Runs every case on every platform.

  `_choose` selects the tile size and the number of key tiles in a step. Larger
  tiles and steps have less overhead, but compute more scores that are not
  needed.
  """

  # tiles to choose from, in positions
  tiles: tuple[int, ...] = 64, 96, 128, 192, 256
  max_keys: int = 512  # the most keys of one tile of queries in a step
  # The most scores of a step, over all heads, if it has several tiles of
  # queries.
  max_scores: int = 300_000

  def unsupported(self, request: contract.Request) -> str | None:
    del request
    return None

  def tile_size(self, part: Pattern, request: contract.Request) -> int:
    tile, _ = _choose(self, part, request.length, request.tile)
    return tile

  def plans(self, request: contract.Request) -> contract.Plans:
    n = request.length
    plans = []
    for part, heads in heads_of_parts(request.patterns, n):
      num_heads = (request.batch or 1) * len(heads)
      plan = _plan(self, part, n, request.tile, num_heads)
      plans.append((plan, heads))
    return plans

  def device_tables(
    self, part: Pattern, layouts: Sequence[Layout], request: contract.Request
  ) -> list[StepTables]:
    # All devices run the same program, so they share the span that is best for
    # all of them together.
    counts = [np.unique(x.rows, return_counts=True)[1] for x in layouts]
    span = _best_span(self, np.concatenate(counts), layouts[0].tile)[1]
    num_heads = (request.batch or 1) * request.num_heads
    return _tables(self, layouts, span, num_heads)

  def forward(
    self,
    plan: contract.Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, jax.Array]:
    loop = PlanLoop(plan, queries, keys)
    return online_softmax.forward(loop, queries, keys, plan.scores)

  def backward(
    self,
    plan: contract.Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, ...]:
    loop = PlanLoop(plan, queries, keys)
    return online_softmax.backward(loop, queries, keys, plan.scores)


ON_CPUS = Xla()
ON_ACCELERATORS = Xla(tiles=(128,), max_keys=1024, max_scores=2**62)


def slice_plans(
  patterns: tuple[Pattern, ...],
  num_queries: int,
  n: int,
  first: jax.Array,
) -> contract.Plans:
  """Makes plans for n keys and consecutive queries that start at `first`.

  Tiles without pairs are found at run time, and skipped.

  Args:
    patterns: one static pattern for each query head.
    num_queries: number of queries, L.
    n: number of keys.
    first: the position of the first query, an int32 that may be traced.
  """
  tile = min(num_queries, SLICE_TILE)
  num_keys = min(n, SLICE_KEYS)
  num_rows = -(-num_queries // tile)
  num_cols = -(-n // num_keys)

  # Each tile of queries meets all tiles of keys, one in each step.
  cols = np.arange(num_rows * num_cols, dtype=np.int32) % num_cols
  steps = StepTables(
    first=num_cols * np.arange(num_rows + 1, dtype=np.int32),
    cols=cols[:, None, None],
    single=False,
    num_keys=num_keys,
  )

  # Tiles are in natural order, because a layout in the pattern's own orders
  # would depend on `first`.
  query_order = make_order(np.arange(num_queries), num_rows * tile, first)
  key_order = make_order(np.arange(n), num_cols * num_keys)

  plans = []
  by_pattern = group_heads([(pattern,) for pattern in patterns])
  for pattern, heads in by_pattern.items():
    plan = contract.Plan(
      pattern=pattern,
      tile=tile,
      tables=steps,
      queries=query_order,
      keys=key_order,
    )
    plans.append((plan, heads))
  return plans


@functools.lru_cache(maxsize=256)
def _plan(backend, part, n, tile, num_heads):
  """Makes the cheapest plan of a part.

  If `tile` is 0, a tile is chosen. `num_heads` counts the heads of all
  sequences.
  """
  tile, span = _choose(backend, part, n, tile)
  layout = part.layout(n, tile)
  (tables,) = _tables(backend, [layout], span, num_heads)
  query_order, key_order = orders_of(layout)
  return contract.Plan(
    pattern=part,
    tile=tile,
    tables=tables,
    queries=query_order,
    keys=key_order,
  )


@functools.lru_cache(maxsize=256)
def _choose(backend, part, n, tile):
  """Chooses the (tile, span) of lowest cost.

  A larger tile needs fewer steps, but computes more scores that are not pairs.
  Both are counted exactly, from the tiles that a layout lists.

  Args:
    backend: the backend, with tiles to choose from, and limits.
    part: the pattern.
    n: positions of a sequence.
    tile: the requested tile size, for which only the span is chosen; 0 to
      choose both.
  """
  asked = (tile,) if tile else backend.tiles
  sizes = sorted({min(size, n) for size in asked})
  choices = []
  for size in sizes:
    # A layout lists all its tiles. If there would be too many, the layout is
    # not made, except for the largest size. Tiles are counted only if n allows
    # too many.
    most_tiles = (-(-n // size)) ** 2
    if size < sizes[-1] and most_tiles > MAX_LAID_OUT:
      if analysis.count_tiles(part, n, size) > MAX_LAID_OUT:
        continue
    layout = part.layout(n, size)
    _, counts = np.unique(layout.rows, return_counts=True)
    cost, span = _best_span(backend, counts, size)
    choices.append((cost, size, span))
  _, size, span = min(choices)
  return size, span


def _best_span(backend, counts, size):
  """Returns (cost, span) for the span of lowest cost.

  `counts` is the number of key tiles in each row, which is a tile of queries.
  The span is the number of key tiles in a step. A tile has `size` positions.
  For example, with a span of 4, a row with 5 key tiles takes 2 steps. These
  have room for 8 tiles, so 3 are padding. Costs are in units of one score, see
  `STEP_COST`.
  """
  costs = []
  largest = max(1, min(backend.max_keys // size, MAX_SPAN))
  for span in range(1, largest + 1):
    num_steps = int((-(-counts // span)).sum())
    # If each row takes one step, no loop is compiled. The overhead is then a
    # cost for each tile of keys, instead of a cost for each step of a loop.
    needs_no_loop = num_steps == len(counts)
    overhead = TILE_COST * span if needs_no_loop else STEP_COST
    cost = num_steps * (size**2 * span + overhead)
    costs.append((cost, span))
  return min(costs)


def _tables(backend, layouts, span, num_heads):
  """Makes the tables of each device from its layout, all with equal shapes.

  Args:
    backend: the backend, which limits the scores of a step.
    layouts: layouts with the same tile and number of positions.
    span: number of key tiles that each query tile meets in a step.
    num_heads: number of heads in all sequences.

  Returns:
    The `StepTables` of each layout. The tables of devices with fewer steps are
    padded with steps that have no tiles and belong to no group.
  """
  tile = layouts[0].tile
  num_queries = len(layouts[0].query_order)
  num_rows = -(-num_queries // tile)

  counts = [np.bincount(layout.rows, minlength=num_rows) for layout in layouts]
  num_steps = -(-np.stack(counts) // span)
  is_single = bool(num_steps.max() <= 1)
  if is_single:  # including rows without tiles
    num_steps = np.ones_like(num_steps)

  # The number of query tiles in a group is the largest that the limits allow.
  most_rows = backend.max_scores // (num_heads * tile**2 * span)
  most_rows = min(most_rows, MAX_TILES // span)
  num_steps, size = _group(num_steps, most_rows)
  most_steps = num_steps.sum(1).max()

  tables = []
  for layout, count, steps in zip(layouts, counts, num_steps, strict=True):
    first = np.append(0, np.cumsum(steps)).astype(np.int32)

    # The tiles of each row are assigned to steps in order, `span` per step.
    row_start = np.cumsum(count) - count
    number = np.arange(len(layout.rows))
    number -= row_start[layout.rows]  # index of a tile in its row
    step, place = np.divmod(number, span)

    group, row = np.divmod(layout.rows, size)
    cols = np.full((most_steps, size, span), -1, np.int32)
    cols[first[group] + step, row, place] = layout.cols
    tables.append(StepTables(first, cols, is_single))
  return tables


def _group(num_steps, largest):
  """Finds the largest size of groups of rows that wastes few steps.

  Args:
    num_steps: number of steps of each tile of queries, int [devices, rows].
    largest: the most tiles of queries in a group.

  Returns:
    The number of steps of each group, [devices, groups], and the number of
    tiles in a group. A group has as many steps as its longest row.
  """
  num_devices, num_rows = num_steps.shape
  most_steps = (1 + MAX_WASTE) * num_steps.sum()
  for size in range(largest, 1, -1):
    # All groups must have the same size, because each size would need a
    # separate program.
    if num_rows % size == 0:
      groups = num_steps.reshape(num_devices, -1, size).max(2)
      if size * groups.sum() <= most_steps:
        return groups, size
  return num_steps, 1


class PlanLoop(online_softmax.TileLoop):
  """The loop over the steps of a plan, on arrays in the plan's orders.

  A group has A tiles of queries. In each step, each tile of queries meets C
  tiles of keys.
  """

  def __init__(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> None:
    tables = plan.tables
    self.pattern = plan.pattern
    self.tile = plan.tile
    self.first = jnp.asarray(tables.first)
    self.cols = jnp.asarray(tables.cols)
    self.num = len(tables.first) - 1
    self.size = tables.cols.shape[1]
    self.single = tables.single
    self.num_keys = tables.num_keys or plan.tile
    self.heads_per_key = queries.q.shape[2] // keys.k.shape[2]  # R

    # The positions in each tile. The query heads of a KV head are consecutive
    # in the rows of a tile.
    orders: Any = plan.queries, plan.keys  # both have `positions`
    q_at, k_at = (jnp.asarray(order.positions) for order in orders)
    q_at = q_at.reshape(-1, self.tile)
    self.q_at = jnp.tile(q_at, (1, self.heads_per_key))
    self.k_at = k_at.reshape(-1, self.num_keys)

    # Steps without pairs are skipped if slices or segments, which are known
    # only at run time, may leave some without pairs. This is not worthwhile if
    # each group has a single step, because few of these have no pairs.
    is_slice = tables.num_keys > 0
    has_segments = queries.segments is not None
    self.skips = is_slice or (has_segments and not self.single)

  def bounds(self, i: Array) -> tuple[Array, Array]:
    return self.first[i], self.first[i + 1]

  def queries(self, i: Array, arrays: Any) -> Any:
    return jax.tree.map(lambda x: self._query_tiles(i, x), arrays)

  def keys(self, i: Array, j: Array, arrays: Any) -> Any:
    cols_AC = self.cols[j]
    return jax.tree.map(lambda x: self._key_tiles(cols_AC, x), arrays)

  def positions(self, i: Array, j: Array) -> tuple[Array, Array]:
    """Returns positions [A, 1, 1, R T] and [A, 1, 1, S].

    T is the number of queries in a tile, and S the number of keys in C tiles.
    The axes of size 1 broadcast over sequences and KV heads.
    """
    q_at = lax.dynamic_slice_in_dim(
      self.q_at,
      i * self.size,
      self.size,
    )

    # Column -1 is padding.
    cols_AC = self.cols[j]
    is_none = cols_AC[..., None] < 0
    k_at = jnp.where(
      is_none,
      -1,
      self.k_at[cols_AC.clip(0)],
    )

    by_tile = self.size, 1, 1, -1
    return q_at.reshape(by_tile), k_at.reshape(by_tile)

  def put(self, i: Array, x_BLH: Array, new: Array) -> Array:
    batch = x_BLH.shape[0]
    num_queries = self.size * self.tile
    by_tile = self.size, batch, -1, self.tile
    new_ABHT = new.reshape(by_tile + new.shape[4:])
    new_BATH = jnp.moveaxis(new_ABHT, (0, 2), (1, 3))
    by_query = batch, num_queries
    new_BLH = new_BATH.reshape(by_query + x_BLH.shape[2:])
    return lax.dynamic_update_slice_in_dim(
      x_BLH,
      new_BLH,
      i * num_queries,
      axis=1,
    )

  def add(self, i: Array, j: Array, x_BLH: Array, new: Array) -> Array:
    # Slices are updated one after another instead of by a scatter, whose order
    # of additions is not fixed. Padding, column -1, has gradients of 0, which
    # may be added to any tile.
    for cols_C, new_BHS in zip(self.cols[j], new, strict=True):
      tiles = jnp.split(new_BHS, len(cols_C), 2)
      for col, tile_BHT in zip(cols_C, tiles, strict=True):
        old_BTH = self._key_tile(x_BLH, col)
        new_BTH = old_BTH + tile_BHT.swapaxes(1, 2)
        x_BLH = lax.dynamic_update_slice_in_dim(
          x_BLH,
          new_BTH,
          col * self.num_keys,
          axis=1,
        )
    return x_BLH

  def _slice_group(self, i, x_BL):
    """Returns the queries of a group: [B, A T, ...]."""
    num_queries = self.size * self.tile
    return lax.dynamic_slice_in_dim(
      x_BL,
      i * num_queries,
      num_queries,
      axis=1,
    )

  def _query_tiles(self, i, x_BLH):
    """Returns the query tiles of a group, [A, B, G, R T, ...].

    An array with a single head is shared by all heads.
    """
    # The batch size may be symbolic, so len() cannot be used.
    batch, _, heads = x_BLH.shape[:3]
    width = x_BLH.shape[3:]

    x_BLH = self._slice_group(i, x_BLH)
    by_tile = batch, self.size, self.tile, heads
    x_BATH = x_BLH.reshape(by_tile + width)
    x_ABHT = jnp.moveaxis(x_BATH, (1, 3), (0, 2))

    # Segments are the same for all heads.
    if heads < self.heads_per_key:
      x_ABHT = jnp.repeat(x_ABHT, self.heads_per_key, 2)

    num_rows = self.heads_per_key * self.tile
    by_key_head = self.size, batch, -1, num_rows
    return x_ABHT.reshape(by_key_head + width)

  def _key_tiles(self, cols_AC, x_BLH):
    """Returns key tiles, [A, B, G, C T, ...]; index -1 selects any tile."""

    # A gather is a single operation for any number of tiles. The CPU compiler
    # of jax 0.10.2 copies concatenated slices at only a fifth of its speed.
    take = functools.partial(self._key_tile, x_BLH)
    x_ACBTH = jax.vmap(jax.vmap(take))(cols_AC)
    x_ABHCT = jnp.moveaxis(x_ACBTH, (2, 4), (1, 2))
    by_key = self.size, x_BLH.shape[0], x_BLH.shape[2], -1
    return x_ABHCT.reshape(by_key + x_BLH.shape[3:])

  def _key_tile(self, x_BLH, col):
    """Returns a tile of keys, [B, T, G, ...]."""
    return lax.dynamic_slice_in_dim(
      x_BLH,
      col * self.num_keys,
      self.num_keys,
      axis=1,
    )
