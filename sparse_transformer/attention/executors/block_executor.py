"""The base of executors whose kernels copy blocks, see `block_tables`.

There is a plan for each order of queries. It runs all parts that have this
order, of all heads, in one launch of each kernel; keys follow each other in all
the orders that these parts have.
"""

import abc
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import contract
from sparse_transformer.attention.executors import block_tables, items
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.attention.orders import Orders, orders_of
from sparse_transformer.patterns import Layout, Pattern, analysis


@dataclasses.dataclass(frozen=True)
class BlockExecutor(contract.Executor):
  """An executor whose kernels follow tables of blocks and steps."""

  interpret: bool = False  # whether to interpret the kernels, on any platform

  TILES: ClassVar[
    tuple[int, ...]
  ]  # positions on a side to choose from, ascending
  SMALLEST = 32  # that kernels can run
  # What each step and each pair of its tile costs, in units of one's own.
  STEP: ClassVar[float]
  PAIR: ClassVar[float]
  MOST_STEPS = 2**31 - 1  # of one grid
  ROWS: ClassVar[bool]  # whether blocks are [tile, K], not [K, tile]

  @abc.abstractmethod
  def kernels(self) -> Any:
    """The module with the kernels, imported only where they run.

    launch(name, plan, (queries, keys), outs, interpret) runs one of "forward",
    "backward_of_queries" and "backward_of_keys" on blocks. It returns those of
    each result, of which `outs` has the width, 0 for none, and the dtype.
    """

  def tiles(self, case: contract.Case) -> tuple[int, ...]:
    """The values of `TILES` that a case supports."""
    del case
    return self.TILES

  def unsupported_tile(
    self, case: contract.Case, tiles: Sequence[int]
  ) -> str | None:
    """Why the tile that is asked for, if any, is none of the given ones."""
    # `attend` reduces the tile of a short sequence.
    is_short = case.length <= case.tile < self.SMALLEST
    if not case.tile or case.tile in tiles or is_short:
      return None
    return (
      f"tiles must have {' or '.join(map(str, tiles))} positions, got"
      f" tile={case.tile}; 0 chooses"
    )

  def tile_size(self, part: Pattern, case: contract.Case) -> int:
    return self._tile_of((part,), case)

  def common_tile(
    self, patterns: tuple[Pattern, ...], case: contract.Case
  ) -> int:
    """The tile that `plans` chooses for all heads."""
    tiles = self.tiles(case), self.STEP, self.PAIR
    return _choose_tile(patterns, case.length, *tiles)

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

  def _tile_of(self, patterns, case):
    """The tile with which patterns run."""
    tile = case.tile or self.common_tile(patterns, case)
    return max(items.check_tile(tile, case.length), self.SMALLEST)

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
    """The results of a kernel; they are rounded if no other plan has some."""
    heads = [arrays[0].shape[2] for arrays in given]
    blocks = [
      jax.tree.map(
        lambda x, h=h: block_tables.to_blocks(x, plan.tile, h, self.ROWS), side
      )
      for side, h in zip(given, heads, strict=True)
    ]
    if not plan.tables.is_whole:
      outs = [(width, jnp.promote_types(x, jnp.float32)) for width, x in outs]
    found = self.kernels().launch(name, plan, blocks, outs, self.interpret)
    own = heads[name == "backward_of_keys"]
    return [
      block_tables.from_blocks(x, own, self.ROWS, width > 0)
      for x, (width, _) in zip(found, outs, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _plans(patterns, n, tile, group, most_steps):
  """The plans of heads, see `BlockExecutor`."""
  by_order: dict[bytes, list] = {}
  for part, heads in heads_of_parts(patterns, n):
    layout = part.layout(n, tile)
    all_heads = range(len(patterns)) if heads is None else heads
    of_order = by_order.setdefault(layout.query_order.tobytes(), [])
    of_order.append((part, all_heads, layout))
  is_whole = len(by_order) == 1
  return [
    _plan(parts, (len(patterns), group), most_steps, is_whole)
    for parts in by_order.values()
  ]


def _plan(parts, sizes_of_heads, most_steps, is_whole):
  """(the plan of (part, heads, layout)s with an order of queries, heads)."""
  num_heads, group = sizes_of_heads
  heads = sorted(set().union(*(of_part for _, of_part, _ in parts)))
  chosen = None if len(heads) == num_heads else tuple(heads)
  of_keys = key_heads(chosen, group)
  group = len(heads) // len(of_keys) if of_keys is not None else group
  keys, firsts = _orders_of_keys([layout for *_, layout in parts])
  queries = Orders(orders_of(parts[0][2])[:1])
  by_place = [
    (
      part,
      tuple(map(heads.index, of_part)),
      [
        dataclasses.replace(
          layout,
          key_order=np.concatenate([x.positions for x in keys.orders]),
          cols=layout.cols + first,
        )
      ],
    )
    for (part, of_part, layout), first in zip(parts, firsts, strict=True)
  ]
  sizes = len(queries.positions), len(by_place[0][2][0].key_order)
  works = items.work_by_place(by_place, sizes, len(heads), group)
  (tables,) = block_tables.tables_of(works, group, most_steps)
  tables = dataclasses.replace(tables, is_whole=is_whole)
  return contract.Plan(None, parts[0][2].tile, tables, queries, keys), chosen


def _orders_of_keys(layouts: Sequence[Layout]) -> tuple[Orders, list[int]]:
  """The distinct orders of keys, and the first tile of that of each layout."""
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
def _choose_tile(
  patterns: tuple[Pattern, ...],
  n: int,
  tiles: tuple[int, ...],
  step: float,
  pair: float,
) -> int:
  """The tile with which steps and their pairs cost least.

  Larger tiles take fewer steps, but cover more than the pairs.
  """

  def cost(tile):
    num_tiles = sum(
      analysis.count_tiles(part, n, tile)
      * (len(patterns) if heads is None else len(heads))
      for part, heads in heads_of_parts(patterns, n)
    )
    return num_tiles * (step + tile**2 * pair)

  return min((t for t in tiles if t < 2 * n or t == tiles[0]), key=cost)
