"""The executors for TPUs and Hopper GPUs, whose kernels copy blocks.

A plan has all parts, of all heads, with one order of queries; keys follow each
other in all the orders that these parts have. See `block_tables`.
"""

import abc
import dataclasses
import functools
from collections.abc import Container, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import contract, platforms
from sparse_transformer.attention.executors import block_tables, items
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.attention.orders import Orders, orders_of
from sparse_transformer.patterns import Layout, Pattern, analysis


@dataclasses.dataclass(frozen=True)
class BlockExecutor(contract.Executor):
  """An executor whose kernels follow tables of blocks and steps."""

  interpret: bool = False  # whether to interpret the kernels, on any platform

  PLATFORM: ClassVar[str]
  DEVICE: ClassVar[str]
  DTYPES: ClassVar[tuple[str, ...]]
  # The widths of heads that the device supports, and these in words.
  WIDTHS: ClassVar[Container[int]]
  WIDTHS_ARE: ClassVar[str]
  TILES: ClassVar[tuple[int, ...]]  # positions to choose from, ascending
  SMALLEST = 32  # positions in a tile that kernels can run
  # What each step and each pair of its tile costs, in units of one's own.
  STEP: ClassVar[float]
  PAIR: ClassVar[float]
  MOST_STEPS = 2**31 - 1  # of one grid
  ROWS: ClassVar[bool]  # whether blocks are [tile, K], not [K, tile]

  @abc.abstractmethod
  def kernels(self) -> Any:
    """The module with the kernels, imported only where they run.

    launch(name, plan, (queries, keys), outs, interpret) runs one of "forward",
    "backward_of_queries" and "backward_of_keys" on blocks. It returns the
    blocks of each result; `outs` has their widths (0: none) and dtypes.
    """

  def tiles(self, case: contract.Case) -> tuple[int, ...]:
    """The values of `TILES` that a case supports."""
    del case
    return self.TILES

  def unsupported(self, case: contract.Case) -> str | None:
    if not self.interpret and case.platform != self.PLATFORM:
      return f"it needs {self.DEVICE}"
    # `attend` reduces the tile of a short sequence.
    is_short = case.length <= case.tile < self.SMALLEST
    tiles = self.tiles(case)
    if case.tile and case.tile not in tiles and not is_short:
      return (
        f"tiles must have {' or '.join(map(str, tiles))} positions, got"
        f" tile={case.tile}; 0 chooses"
      )
    if self.interpret:
      return None
    if case.dtype not in self.DTYPES:
      return f"it needs {' or '.join(self.DTYPES)}, got {case.dtype}"
    if lacking := contract.NOT_IN_KERNELS & {*case.others}:
      return f"it does not have {' or '.join(sorted(lacking))}"
    widths = case.qk_width, case.value_width
    if not all(width in self.WIDTHS for width in widths):
      return f"widths of heads must be {self.WIDTHS_ARE}, got {widths}"
    return None

  def tile_size(self, part: Pattern, case: contract.Case) -> int:
    return self._tile_of((part,), case)

  def common_tile(
    self, patterns: tuple[Pattern, ...], case: contract.Case
  ) -> int:
    """The tile that `plans` chooses for all heads."""
    tiles = self.tiles(case), self.STEP, self.PAIR
    return _choose_tile(patterns, case.length, *tiles)

  def _tile_of(self, patterns, case):
    tile = case.tile or self.common_tile(patterns, case)
    return max(contract.fit_tile(tile, case.length), self.SMALLEST)

  def plans(
    self, patterns: tuple[Pattern, ...], case: contract.Case
  ) -> contract.Plans:
    tile = self._tile_of(patterns, case)
    return _plans(patterns, case.length, tile, case.group, self.MOST_STEPS)

  def shares(
    self, part: Pattern, layouts: Sequence[Layout], case: contract.Case
  ) -> list[block_tables.BlockTables]:
    works = items.make_shares(part, layouts, case.num_heads, case.group)
    return block_tables.tables_of(works, case.group, self.MOST_STEPS)

  def forward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, jax.Array]:
    outs = (keys.v.shape[-1], keys.v.dtype), (0, jnp.float32)
    out, lse = self._run("forward", plan, (queries, keys), outs)
    return out, lse

  def backward(
    self, plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
  ) -> tuple[jax.Array, ...]:
    given = queries, keys
    of_dq, *outs = ((x.shape[-1], x.dtype) for x in (queries.q, *keys[:2]))
    dq = self._run("backward_of_queries", plan, given, [of_dq])
    return *dq, *self._run("backward_of_keys", plan, given, outs)

  def _run(self, name, plan, given, outs):
    """The results of a kernel, rounded unless others are added to them."""
    heads = [arrays[0].shape[2] for arrays in given]
    blocks = [
      jax.tree.map(
        lambda x, h=h: block_tables.to_blocks(x, plan.tile, h, self.ROWS), side
      )
      for side, h in zip(given, heads, strict=True)
    ]
    if not plan.is_whole:
      outs = [(width, np.promote_types(x, np.float32)) for width, x in outs]
    found = self.kernels().launch(name, plan, blocks, outs, self.interpret)
    own = heads[name == "backward_of_keys"]
    return [
      block_tables.from_blocks(x, own, self.ROWS, width > 0)
      for x, (width, _) in zip(found, outs, strict=True)
    ]


class Mosaic(BlockExecutor):
  """Runs fused kernels on TPUs, see `mosaic_kernels`."""

  PLATFORM, DEVICE, DTYPES = "tpu", "a TPU", ("bfloat16", "float32")
  TILES = 128, 256, 512  # with 1,024, VMEM may not suffice
  # In seconds, in all three kernels, as modelled: a step of a grid takes 0.35
  # microseconds, besides the instructions of the program compiled for a v5e, in
  # bfloat16.
  STEP, PAIR = 3 * 0.35e-6, 12e-12
  # Three tables of integers take 768 KiB of 1 MiB of scalar memory.
  MOST_STEPS = 2**16
  WIDTHS, WIDTHS_ARE = range(1, 257), "at most 256"
  ROWS = False

  def tiles(self, case: contract.Case) -> tuple[int, ...]:
    return (32, 64, *self.TILES) if case.tile else self.TILES

  def kernels(self) -> Any:
    from sparse_transformer.attention.executors import mosaic_kernels

    return mosaic_kernels


class Hopper(BlockExecutor):
  """Runs fused kernels on Hopper GPUs, see `hopper_kernels`."""

  PLATFORM, DEVICE, DTYPES = "cuda", "an NVIDIA GPU", ("bfloat16", "float16")
  TILES = 64, 128
  SMALLEST = 64
  STEP, PAIR = 64**2, 1  # in pairs: a guess, not measured
  WIDTHS, WIDTHS_ARE = (64, 128), "64 or 128"
  ROWS = True
  CAPABILITY = 9.0  # later ones have no wgmma
  MIN_JAX = 0, 11, 2  # whose Mosaic GPU can compile and interpret the kernels

  def tiles(self, case: contract.Case) -> tuple[int, ...]:
    # With wider heads, tiles of 128 spill registers.
    is_wide = max(case.qk_width, case.value_width) > self.WIDTHS[0]
    return self.TILES[:1] if is_wide else self.TILES

  def unsupported(self, case: contract.Case) -> str | None:
    if jax.__version_info__ < self.MIN_JAX:
      return f"it needs jax {'.'.join(map(str, self.MIN_JAX))} or later"
    others = platforms.compute_capabilities() - {self.CAPABILITY}
    if others and not self.interpret and case.platform == self.PLATFORM:
      return f"it needs compute capability {self.CAPABILITY}, got {min(others)}"
    return super().unsupported(case)

  def kernels(self) -> Any:
    from sparse_transformer.attention.executors import hopper_kernels

    return hopper_kernels


@functools.lru_cache(maxsize=64)
def _plans(patterns, n, tile, group, most_steps):
  """The plans of heads, one for each order of queries."""
  by_order: dict[bytes, list] = {}
  for part, heads in heads_of_parts(patterns, n):
    layout = part.layout(n, tile)
    all_heads = range(len(patterns)) if heads is None else heads
    of_order = by_order.setdefault(layout.query_order.tobytes(), [])
    of_order.append((part, all_heads, layout))
  found = []
  for parts in by_order.values():
    own = sorted(set().union(*(of_part for _, of_part, _ in parts)))
    chosen = None if len(own) == len(patterns) else tuple(own)
    of_keys = key_heads(chosen, group)
    of_each = group if of_keys is None else len(own) // len(of_keys)
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
def _choose_tile(patterns, n, tiles, step, pair):
  """The tile with which steps and their pairs cost least."""

  def cost(tile):
    num_tiles = sum(
      analysis.count_tiles(part, n, tile)
      * (len(patterns) if heads is None else len(heads))
      for part, heads in heads_of_parts(patterns, n)
    )
    return num_tiles * (step + tile**2 * pair)

  return min((t for t in tiles if t < 2 * n or t == tiles[0]), key=cost)
