"""The executor for TPUs, whose kernels copy blocks.

A plan has all parts, of all heads, with one order of queries; keys follow each
other in all the orders that these parts have. See `block_tables`.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import block_tables, items
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.attention.orders import Orders, orders_of
from sparse_transformer.patterns import Layout, Pattern, analysis

DTYPES = "bfloat16", "float32"
MAX_WIDTH = 256  # of heads
TILES = 128, 256, 512  # to choose from: with 1,024, VMEM may not suffice
SMALL_TILES = 32, 64  # which kernels can run, and nothing chooses
# What a step of a grid and a pair of its tile cost, in seconds, in all three
# kernels, as modelled: a step takes 0.35 microseconds, besides the instructions
# of the program compiled for a v5e, in bfloat16.
STEP_COST = 3 * 0.35e-6
PAIR_COST = 12e-12


@dataclasses.dataclass(frozen=True)
class Mosaic(contract.Executor):
  """Runs fused kernels on TPUs, see `mosaic_kernels`."""

  interpret: bool = False  # whether to interpret the kernels, on any platform
  # Of one grid: three tables of integers take 768 KiB of the 1 MiB of scalar
  # memory.
  MOST_STEPS = 2**16

  def unsupported(self, request: contract.Request) -> str | None:
    if not self.interpret and request.platform != "tpu":
      return "it needs a TPU"
    # `attend` reduces the tile of a short sequence.
    is_short = request.length <= request.tile < self.smallest_tile
    known = (*SMALL_TILES, *TILES)
    if request.tile and request.tile not in known and not is_short:
      return (
        f"tiles must have {' or '.join(map(str, known))} positions, got"
        f" tile={request.tile}; 0 chooses"
      )
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
    del part  # all parts have one tile
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
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    outs = (keys.v.shape[-1], keys.v.dtype), (0, jnp.float32)
    out, lse = self._run("forward", plan, (queries, keys), outs)
    return out, lse

  def backward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, ...]:
    sides = queries, keys
    of_dq, *outs = ((x.shape[-1], x.dtype) for x in (queries.q, *keys[:2]))
    dq = self._run("backward_of_queries", plan, sides, [of_dq])
    return *dq, *self._run("backward_of_keys", plan, sides, outs)

  def _run(self, name, plan, sides, outs):
    """The results of a kernel, rounded unless others are added to them."""
    # Pallas for TPUs is imported only where kernels run.
    from sparse_transformer.attention.executors import mosaic_kernels

    heads = [arrays[0].shape[2] for arrays in sides]
    blocks = [
      jax.tree.map(lambda x, h=h: block_tables.to_blocks(x, plan.tile, h), side)
      for side, h in zip(sides, heads, strict=True)
    ]
    if not plan.is_whole:
      outs = [(width, np.promote_types(x, np.float32)) for width, x in outs]

    results = mosaic_kernels.launch(name, plan, blocks, outs, self.interpret)
    own = heads[name == "backward_of_keys"]
    return [
      block_tables.from_blocks(x, own, width > 0)
      for x, (width, _) in zip(results, outs, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _plans(patterns, n, tile, group, most_steps):
  """The plans of heads, one for each order of queries."""
  by_order: dict[bytes, list] = {}
  for part, heads in heads_of_parts(patterns, n):
    layout = part.layout(n, tile)
    of_order = by_order.setdefault(layout.query_order.tobytes(), [])
    of_order.append((part, heads, layout))
  found = []
  for parts in by_order.values():
    own = sorted(set().union(*(of_part for _, of_part, _ in parts)))
    chosen = tuple(own)
    of_each = len(own) // len(key_heads(chosen, group))
    work, orders = _work(parts, own, of_each)
    (tables,) = block_tables.tables_of([work], of_each, most_steps)
    found.append((contract.Plan(None, tile, tables, *orders), chosen))
  return found


def _work(parts, heads, group):
  """The work of (part, heads, layout)s with an order of queries; its orders."""
  layouts = [layout for *_, layout in parts]
  queries = Orders(orders_of(layouts[0])[:1])
  keys, firsts = _orders_of_keys(layouts)
  tile = layouts[0].tile
  masks = items.Masks(tile)
  tiles = [
    items.Tiles(
      [heads.index(x) for x in of_part],
      layout.rows,
      layout.cols + first,
      masks.add(part, layout),
    )
    for (part, of_part, layout), first in zip(parts, firsts, strict=True)
  ]
  orders = queries, keys
  sides = [items.by_place(len(x.positions), tile) for x in orders]
  return items.make_work(tiles, masks, sides, len(heads), group), orders


def _orders_of_keys(layouts):
  """The distinct orders of keys, and the first tile of each layout's order."""
  by_order: dict[bytes, list[Layout]] = {}
  for layout in layouts:
    by_order.setdefault(layout.key_order.tobytes(), []).append(layout)
  orders, firsts, first = [], {}, 0
  for name, found in by_order.items():
    cols = np.concatenate([layout.cols for layout in found])
    _, keys = orders_of(dataclasses.replace(found[0], cols=cols))
    orders.append(keys)
    firsts[name] = first
    first += len(keys.positions) // found[0].tile
  chosen = [firsts[layout.key_order.tobytes()] for layout in layouts]
  return Orders(tuple(orders)), chosen


@functools.lru_cache(maxsize=256)
def _choose_tile(patterns, n):
  """The tile with which steps and their pairs cost least."""

  def cost(tile):
    num_tiles = sum(
      analysis.count_tiles(part, n, tile) * len(heads)
      for part, heads in heads_of_parts(patterns, n)
    )
    return num_tiles * (STEP_COST + tile**2 * PAIR_COST)

  return min((t for t in TILES if t < 2 * n or t == TILES[0]), key=cost)
