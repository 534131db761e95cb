"""The backend for TPUs, with fused kernels that copy blocks.

A plan includes all parts, of all heads, that have the same order of queries. If
these parts have several orders of keys, the keys are arranged in all of these
orders, one after another. See `block_tables`.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.backends import block_tables, items
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.attention.orders import Orders, orders_of
from sparse_transformer.patterns import Layout, Pattern, analysis

DTYPES = "bfloat16", "float32"
MAX_WIDTH = 256  # the largest width of a head
# tiles to choose from; with 1,024, VMEM may not be sufficient
TILES = 128, 256, 512
# tiles that kernels can run, but that are never chosen automatically
SMALL_TILES = 32, 64
# Modelled costs, in seconds, of a grid step and of a pair in its tile, over all
# three kernels: a step takes 0.35 microseconds, in addition to the instructions
# of the program compiled for a v5e in bfloat16.
STEP_COST = 3 * 0.35e-6
PAIR_COST = 12e-12


@dataclasses.dataclass(frozen=True)
class Mosaic(contract.Backend):
  """Runs fused kernels on TPUs, see `mosaic_kernels`.

  Kernels run on blocks of consecutive positions, so arrays are first sorted
  into the order of a plan. Parts with the same order of queries share a plan,
  and therefore a single pass over the queries with one running softmax.
  """

  # whether to interpret kernels, which works on any platform
  interpret: bool = False
  # The most steps of one grid. Its three tables of integers then take 768 KiB
  # of the 1 MiB of scalar memory.
  MOST_STEPS = 2**16

  def unsupported(self, request: contract.Request) -> str | None:
    if not self.interpret and request.platform != "tpu":
      return "it needs a TPU"
    if request.features.bias:
      return "it does not have a bias"
    if lacking := platforms.lacks(self.kernels):
      return lacking

    # `attend` reduces the tile of a short sequence.
    is_short = request.length <= request.tile < self.smallest_tile
    known = SMALL_TILES + TILES
    if request.tile and request.tile not in known and not is_short:
      return (
        f"tiles must have {' or '.join(map(str, known))} positions, got"
        f" tile={request.tile}; 0 chooses"
      )

    # The interpreter has no hardware limits.
    if self.interpret:
      return None

    if request.dtype not in DTYPES:
      return f"it needs {' or '.join(DTYPES)}, got {request.dtype}"
    if request.features.mixed_dtypes:
      return "it does not have values of another dtype"
    if request.features.symbolic_batch:
      return "it does not have a symbolic batch"
    widths = request.qk_width, request.value_width
    if max(widths) > MAX_WIDTH:
      return f"widths of heads must be at most {MAX_WIDTH}, got {widths}"
    return None

  def tile_size(self, part: Pattern, request: contract.Request) -> int:
    del part  # all parts use the same tile
    tile = request.tile or _choose_tile(request.patterns, request.length)
    return max(contract.fit_tile(tile, request.length), self.smallest_tile)

  def plans(self, request: contract.Request) -> contract.Plans:
    return _plans(
      request.patterns,
      request.length,
      self.tile_size(request.patterns[0], request),
      request.group,
      self.MOST_STEPS,
    )

  def device_tables(
    self, part: Pattern, layouts: Sequence[Layout], request: contract.Request
  ) -> list[block_tables.BlockTables]:
    works = items.make_shares(part, layouts, request.num_heads, request.group)
    return block_tables.tables_of(works, request.group, self.MOST_STEPS)

  def forward(
    self,
    plan: contract.Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, jax.Array]:
    lse = jax.ShapeDtypeStruct(queries.q.shape[:3], jnp.float32)
    out, lse = self._run("forward", plan, queries, keys, [keys.v, lse])
    return out, lse

  def backward(
    self,
    plan: contract.Plan,
    queries: contract.Queries,
    keys: contract.Keys,
  ) -> tuple[jax.Array, ...]:
    run = functools.partial(self._run, plan=plan, queries=queries, keys=keys)
    (dq,) = run("backward_of_queries", outs=[queries.q])
    dk, dv = run("backward_of_keys", outs=[keys.k, keys.v])
    return dq, dk, dv

  def _run(self, name, plan, queries, keys, outs):
    """Runs a kernel; `outs` determine the widths and dtypes of its results.

    Arrays are first converted to blocks. Results are converted back from
    blocks, to [B, n, H, W] or [B, n, H].
    """
    num_heads = queries.q.shape[2]
    num_key_heads = keys.k.shape[2]
    blocks = self.kernels().launch(
      name,
      plan,
      _to_blocks(queries, plan.tile, num_heads),
      _to_blocks(keys, plan.tile, num_key_heads),
      outs,
      self.interpret,
    )

    # Results have the heads of the side whose blocks are the items.
    if name == "backward_of_keys":
      num_heads = num_key_heads
    return [
      block_tables.from_blocks(x, num_heads, is_wide=out.ndim == 4)
      for x, out in zip(blocks, outs, strict=True)
    ]

  def kernels(self) -> Any:
    """Returns the module with the kernels, which is imported only if needed."""
    from sparse_transformer.attention.backends import mosaic_kernels

    return mosaic_kernels


def _to_blocks(arrays, tile, num_heads):
  """Converts all arrays of a side to blocks."""
  to_blocks = functools.partial(
    block_tables.to_blocks, tile=tile, num_heads=num_heads
  )
  return jax.tree.map(to_blocks, arrays)


class _Part(NamedTuple):
  """A part of patterns, with its heads and its tiles."""

  pattern: Pattern
  heads: Sequence[int]
  layout: Layout


@functools.lru_cache(maxsize=64)
def _plans(patterns, n, tile, group, most_steps):
  """Makes the plans of heads, one for each order of queries.

  A part runs for all heads that use it. If only some of the query heads of a KV
  head are in a plan, the KV head may occur several times in the plan.

  Args:
    patterns: one for each query head.
    n: positions of a sequence.
    tile: positions on a side of a tile.
    group: number of query heads that share a KV head.
    most_steps: the most steps of a grid.
  """
  by_order = collections.defaultdict(list)
  for pattern, heads in heads_of_parts(patterns, n):
    layout = pattern.layout(n, tile)
    part = _Part(pattern, heads, layout)
    by_order[layout.query_order.tobytes()].append(part)

  plans = []
  for parts in by_order.values():
    # The query heads of the plan, and how many in a row share a KV head.
    members = tuple(sorted({head for part in parts for head in part.heads}))
    size = len(members) // len(key_heads(members, group))
    work, queries, keys = _make_work(parts, members, size)
    (tables,) = block_tables.tables_of([work], size, most_steps)
    plan = contract.Plan(
      pattern=None,
      tile=tile,
      tables=tables,
      queries=queries,
      keys=keys,
    )
    plans.append((plan, members))
  return plans


def _make_work(parts, members, group):
  """Returns (work, queries, keys) of parts that share one order of queries.

  `queries` and `keys` are the `Orders` of the two sides. `members` are the
  heads of all parts; `group` of them share a KV head.
  """
  layout = parts[0].layout
  query_order, _ = orders_of(layout)
  queries = Orders((query_order,))
  keys, first_tiles = _orders_of_keys([part.layout for part in parts])

  masks = items.Masks(layout.tile)
  tiles = []
  for (pattern, heads, layout), first in zip(parts, first_tiles, strict=True):
    # Indices of heads are relative to the plan. Tiles of keys are indexed over
    # all orders.
    of_part = items.Tiles(
      heads=[members.index(head) for head in heads],
      rows=layout.rows,
      cols=layout.cols + first,
      masks=masks.add(pattern, layout),
    )
    tiles.append(of_part)

  # The arrays are already sorted, so a tile's index is its place in the array.
  sides = (
    items.arranged_side(len(queries.positions), layout.tile),
    items.arranged_side(len(keys.positions), layout.tile),
  )
  work = items.make_work(tiles, masks, sides, len(members), group)
  return work, queries, keys


def _orders_of_keys(layouts):
  """Returns the distinct orders of keys, and each layout's first tile.

  Tile indices count over all orders, one order after another, because the
  arrays of keys are concatenated in this way.
  """
  by_order = collections.defaultdict(list)
  for layout in layouts:
    by_order[layout.key_order.tobytes()].append(layout)

  orders = []
  first_tiles = {}
  num_tiles = 0
  for name, sharing in by_order.items():
    # Keys may be omitted only after the last tile of all these layouts.
    cols = np.concatenate([layout.cols for layout in sharing])
    _, order = orders_of(dataclasses.replace(sharing[0], cols=cols))
    orders.append(order)
    first_tiles[name] = num_tiles
    num_tiles += len(order.positions) // sharing[0].tile
  first_of_each = [first_tiles[x.key_order.tobytes()] for x in layouts]
  return Orders(tuple(orders)), first_of_each


@functools.lru_cache(maxsize=256)
def _choose_tile(patterns, n):
  """Returns the tile size with the lowest modeled cost of steps and pairs."""

  # Large tiles need fewer steps; small tiles compute fewer scores that are not
  # pairs.
  def cost(tile):
    num_tiles = 0
    for part, heads in heads_of_parts(patterns, n):
      num_tiles += analysis.count_tiles(part, n, tile) * len(heads)
    return num_tiles * (STEP_COST + tile**2 * PAIR_COST)

  # Larger tiles are not tried if more than half of a tile would be padding.
  able = [tile for tile in TILES if tile < 2 * n or tile == TILES[0]]
  return min(able, key=cost)
