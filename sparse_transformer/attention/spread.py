"""Which device computes what if positions are split over devices.

Each part of a pattern runs in its own orders. Its tiles of queries are dealt
out to the devices in slices of that order. Which keys a device reads follows
from the layout; `moves` finds the cheapest way to bring them there. Where the
work is uneven, a device may get one slice from each end instead; and where
neither is cheap, devices may exchange heads for positions: each then has all
positions of some heads. No pattern is named anywhere.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from jax import lax

from sparse_transformer.attention import moves as moves_lib
from sparse_transformer.attention.contract import (
  Case,
  Executor,
  Heads,
  Plan,
  heads_of_parts,
)
from sparse_transformer.attention.exchange import (
  Axes,
  Exchange,
  OverHeads,
  of_device,
)
from sparse_transformer.attention.moves import Moves, Needs
from sparse_transformer.attention.selection import Directions
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles

# What it costs to move, in the backward pass too: five arrays of queries and
# six of keys, per position, and products of seven matrices per pair. One byte
# of 2 for each element takes as long as this many FLOPs: an H100 with NVLink
# and a TPU v5e do about as many at half of their peak rates.
QUERY_ARRAYS, KEY_ARRAYS, PRODUCTS, FLOPS_PER_BYTE = 5, 6, 7, 1000
HEADS = "heads"  # instead of slices, see `Share.dealing`


@dataclasses.dataclass(frozen=True, eq=False)
class Side:
  """The places of queries, or of keys, on all devices.

  Attributes:
    moves: what devices send each other.
    table, read: see `exchange.Exchange`.
  """

  moves: Moves
  table: np.ndarray
  read: np.ndarray | None


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
  """How devices share a part.

  Attributes:
    dealing: "slices" of the order of queries, one for each device; or
      "zigzag", one from each end.
    queries, keys: what devices have, and how they get it.
    layouts: the tiles of each device, of its own places.
  """

  dealing: str
  queries: Side
  keys: Side
  layouts: tuple[Layout, ...]

  @property
  def tiles(self) -> np.ndarray:
    """How many tiles each device computes."""
    return np.array([len(layout.rows) for layout in self.layouts])

  @property
  def cost(self) -> float:
    """Of the slowest device; see `QUERY_ARRAYS`."""
    pairs = self.tiles.max() * self.layouts[0].tile ** 2
    received = self.queries.moves.received, self.keys.moves.received
    return _cost(pairs, *received)


def _cost(pairs, queries, keys):
  moved = QUERY_ARRAYS * queries + KEY_ARRAYS * keys
  return PRODUCTS * pairs + FLOPS_PER_BYTE * moved


def choose(
  part: Pattern, n: int, tile: int, num_devices: int, num_heads: int
) -> Shares | None:
  """The cheapest way to share a part; None to exchange heads for positions."""
  shares = share_cheapest(part, n, tile, num_devices)
  if num_heads % num_devices:
    return shares
  received = n * (num_devices - 1) / num_devices**2
  pairs = shares.tiles.sum() * tile**2 / num_devices
  is_cheaper = _cost(pairs, received, received) < shares.cost
  return None if is_cheaper else shares


def share_cheapest(
  part: Pattern, n: int, tile: int, num_devices: int
) -> Shares:
  """The cheaper of both dealings; see `share`."""
  slices = share(part, n, tile, num_devices, "slices")
  if slices.tiles.max() * num_devices <= slices.tiles.sum():
    return slices
  zigzag = share(part, n, tile, num_devices, "zigzag")
  return min(slices, zigzag, key=lambda shares: shares.cost)


@functools.lru_cache(maxsize=128)
def share(
  part: Pattern, n: int, tile: int, num_devices: int, dealing: str
) -> Shares:
  """How devices share a part.

  Args:
    part: one of a pattern's parts.
    n: number of positions, a multiple of the number of devices.
    tile: positions on a side of a tile.
    num_devices: that positions are split over.
    dealing: see `Shares`.
  """
  layout, own = part.layout(n, tile), n // num_devices
  rows = _deal(-(-n // tile), num_devices, dealing)
  device_of, row_of = (np.empty(rows.size, int) for _ in range(2))
  device_of[rows] = np.arange(num_devices)[:, None]
  row_of[rows] = np.arange(rows.shape[1])
  device = device_of[layout.rows]
  queries = _queries(layout, rows, own)
  needs, columns = _needs_of_keys(part, layout, device, own)
  keys, cols = _keys(layout, needs, columns, num_devices)
  layouts = _cut(
    layout, device, row_of[layout.rows], cols, queries.table, keys.table
  )
  return Shares(dealing, queries, keys, layouts)


def _deal(num_rows, num_devices, dealing):
  """The tiles of queries of each device, ascending: [devices, tiles].

  Some may not exist.
  """
  size = -(-num_rows // num_devices)
  if dealing == "slices":
    return np.arange(num_devices * size).reshape(num_devices, size)
  # Slices of half the size, from both ends; if that is odd, the rest as above.
  # Every other pair goes to the device whose own slice is its second one.
  half, pair = size // 2, np.arange(num_devices)
  ends = np.arange(num_devices * half).reshape(num_devices, half)
  last = num_devices * size - 1 - ends[:, ::-1]
  middle = num_devices * half + np.arange(num_devices * (size - 2 * half))
  dealt = np.concatenate([ends, middle.reshape(num_devices, -1), last], axis=1)
  return dealt[
    np.argsort(np.where(pair % 2, num_devices - 1 - pair // 2, pair // 2))
  ]


def _queries(layout, rows, own):
  """The side of queries, for the tiles of each device."""
  n, tile = len(layout.query_order), layout.tile
  ranks = (rows[..., None] * tile + np.arange(tile)).reshape(len(rows), -1)
  order = layout.query_order
  needs = moves_lib.needs_of([r[r < n] for r in ranks], order, own)
  moves = moves_lib.cheapest(needs, len(rows), tile)
  table = np.where(ranks < n, order[ranks.clip(max=n - 1)], -1)
  if moves.kind == "none" and np.array_equal(table, moves.held):
    return Side(moves, table.astype(np.int32), None)
  read = np.full(ranks.shape, -1, np.int32)
  read[ranks < n] = _places(moves.held, needs)
  return Side(moves, table.astype(np.int32), read)


def _needs_of_keys(part, layout, device, own):
  """What devices need of keys, and the number of each tile's column.

  Columns are those of a device that some of its tiles are in. Only keys that
  have a pair there are needed, which matters for those of other devices.
  """
  n, tile = len(layout.key_order), layout.tile
  num_cols = -(-n // tile)
  columns, number = np.unique(
    device * num_cols + layout.cols, return_inverse=True
  )
  of_device_, col = np.divmod(columns, num_cols)
  ranks = col[:, None] * tile + np.arange(tile)
  exists = ranks < n
  positions = layout.key_order[ranks.clip(max=n - 1)]
  is_own = positions // own == of_device_[:, None]
  is_away = (~is_own & exists).any(1)
  needed = exists & ~is_away[:, None]
  needed[number[layout.full & is_away[number]]] = True
  partial = np.flatnonzero(~layout.full & is_away[number])
  rows, cols = layout.rows[partial], layout.cols[partial]
  for here, pairs in pairs_of_tiles(part, n, tile, rows, cols):
    found, key = np.nonzero(pairs.any(1))
    needed[number[partial[here]][found], key] = True
  needed &= exists
  column = np.nonzero(needed)[0]
  needs = Needs(of_device_[column], ranks[needed], positions[needed], own)
  return needs, _Columns(number, column, of_device_)


@dataclasses.dataclass(frozen=True, eq=False)
class _Columns:
  """Tiles of keys of devices.

  Attributes:
    of_tile: int [tiles], the column of each tile of the layout.
    of_need: int [needs], that of each need; ascending.
    device: int [columns], whose it is.
  """

  of_tile: np.ndarray
  of_need: np.ndarray
  device: np.ndarray


def _keys(layout, needs, columns, num_devices):
  """(the side of keys, the place of each tile among those of its device).

  If the needs of each column arrive within one tile, keys are left where they
  arrive.
  """
  tile = layout.tile
  moves = moves_lib.cheapest(needs, num_devices, tile)
  place = _places(moves.held, needs)
  starts = np.searchsorted(columns.of_need, np.arange(len(columns.device)))
  if len(starts):
    first = np.minimum.reduceat(place // tile, starts)
    last = np.maximum.reduceat(place // tile, starts)
    if (first == last).all():
      missing = -moves.held.shape[1] % tile
      table = np.pad(moves.held, ((0, 0), (0, missing)), constant_values=-1)
      return Side(moves, table, None), first[columns.of_tile]
  starts = np.searchsorted(columns.device, np.arange(num_devices + 1))
  number = np.arange(len(columns.device)) - starts[columns.device]
  size = max(1, int(np.diff(starts).max())) * tile
  table, read = (np.full((num_devices, size), -1, np.int32) for _ in range(2))
  at = needs.device, number[columns.of_need] * tile + needs.rank % tile
  table[at], read[at] = needs.position, place
  return Side(moves, table, read), number[columns.of_tile]


def _places(held, needs):
  """Where each need is among what its device holds."""
  device, place = np.nonzero(held >= 0)
  n = held.shape[0] * needs.own
  known = device * n + held[device, place]
  order = np.argsort(known, kind="stable")
  wanted = needs.device * n + needs.position
  return place[order[np.searchsorted(known, wanted, sorter=order)]]


def _cut(layout, device, rows, cols, query_table, key_table):
  """The layout of each device, of its own places."""
  order = np.lexsort((np.arange(len(rows)), rows, device))
  pieces = np.split(
    order, np.searchsorted(device[order], range(1, len(query_table)))
  )
  return tuple(
    _merge_tiles(
      dataclasses.replace(
        layout,
        query_order=query_table[d],
        key_order=key_table[d],
        rows=rows[piece],
        cols=cols[piece],
        pairs=layout.pairs[piece],
        full=layout.full[piece],
      )
    )
    for d, piece in enumerate(pieces)
  )


def _merge_tiles(layout):
  """The same, where several columns are in one tile of what arrives."""
  keys = layout.rows * len(layout.key_order) + layout.cols
  _, first, number = np.unique(keys, return_index=True, return_inverse=True)
  if len(first) == len(layout.rows):
    return layout
  pairs = np.zeros(len(first), int)
  np.add.at(pairs, number, layout.pairs)
  order = np.argsort(first)
  kept = first[order]
  return dataclasses.replace(
    layout,
    rows=layout.rows[kept],
    cols=layout.cols[kept],
    pairs=pairs[order],
    full=layout.full[kept],
  )


def tile_of(
  executor: Executor, part: Pattern, case: Case, tile: int, own: int
) -> int:
  """The tile of a part, if each device has `own` positions.

  A divisor of that, if there is a large one: then the tiles of a device have
  no positions of others. For kernels, it stays a power of two.
  """
  tile = min(tile, case.length) or executor.tile_size(part, case)
  if not tile & (tile - 1):
    divisor = math.gcd(tile, own)
    return divisor if divisor >= min(tile, 32) else tile
  return max(t for t in range(1, tile + 1) if own % t == 0 or t == tile // 4)


@dataclasses.dataclass(frozen=True, eq=False)
class Decision:
  """How one part runs.

  Attributes:
    part: the part.
    heads: the heads that have it.
    num_heads: how many these are.
    tile: positions on a side of a tile.
    shares: how devices share it; None if they exchange heads for positions.
  """

  part: Pattern
  heads: Heads
  num_heads: int
  tile: int
  shares: Shares | None


def decide(
  executor: Executor,
  patterns: tuple[Pattern, ...],
  case: Case,
  tile: int,
  num_devices: int,
) -> list[Decision]:
  """How the parts of patterns run.

  Args:
    executor: runs them.
    patterns: one per head.
    case: what is run, of the length of the whole sequence.
    tile: positions on a side of a tile; 0 chooses automatically.
    num_devices: that positions are split over.
  """
  n, found = case.length, []
  for part, heads in heads_of_parts(patterns, n):
    count = len(patterns) if heads is None else len(heads)
    size = tile_of(executor, part, case, tile, n // num_devices)
    shares = choose(part, n, size, num_devices, count)
    found.append(Decision(part, heads, count, size, shares))
  return found


def plans(
  executor: Executor,
  patterns: tuple[Pattern, ...],
  case: Case,
  tile: int,
  axes: Axes,
) -> list[tuple[Plan, Heads]]:
  """The plans of a device for all parts, each with its heads.

  Args:
    executor: runs them.
    patterns: one per head.
    case: what is run, of the length that a device has.
    tile: positions on a side of a tile; 0 chooses automatically.
    axes: mesh axes that positions are split over.

  Raises:
    ValueError: the executor cannot run if positions are split.
  """
  num_devices = lax.axis_size(axes)
  if not hasattr(executor, "shares"):
    raise ValueError(
      f"positions are split over {num_devices} devices, but the executor"
      " has no method `shares`; use another attention.backend"
    )
  case = dataclasses.replace(case, length=case.length * num_devices)
  found = []
  for x in decide(executor, patterns, case, tile, num_devices):
    if x.shares is None:
      few = x.num_heads // num_devices
      few_case = dataclasses.replace(case, num_heads=few)
      for plan, _ in executor.plans((x.part,) * few, few_case, tile):
        found.append((_over_heads(plan, axes), x.heads))
    else:
      key: Any = executor, x.part, case.length, x.tile
      tables = _tables(*key, num_devices, x.num_heads)
      found.append((_plan(x, tables, axes), x.heads))
  return found


def of_own_heads(
  patterns: tuple[Pattern, ...], directions: Directions, axes: Axes
) -> tuple[tuple[Pattern, ...], Directions]:
  """The patterns and directions of a device's heads, if it has all positions.

  Args:
    patterns: one per head.
    directions: as in `attention.attend`.
    axes: mesh axes that positions are split over, and heads meanwhile.

  Raises:
    ValueError: heads cannot be split so that devices have the same patterns.
  """
  num_devices = lax.axis_size(axes)
  few = len(patterns) // num_devices
  if patterns[:few] * num_devices != patterns:
    raise ValueError(
      "patterns that follow the content need all positions of a head on one"
      f" device, but {len(patterns)} heads cannot be split over"
      f" {num_devices} devices so that all have the same patterns; split"
      " positions over fewer devices, or change the number of heads"
    )
  first = lax.axis_index(axes) * few
  return patterns[:few], {
    pattern: given
    if len(given) == 1
    else lax.dynamic_slice_in_dim(given, first, few)
    for pattern, given in directions.items()
  }


def _over_heads(plan, axes):
  queries, keys = (OverHeads(axes, x) for x in (plan.queries, plan.keys))
  return dataclasses.replace(plan, queries=queries, keys=keys)


def _plan(decision, tables, axes):
  shares = decision.shares
  queries, keys = (
    Exchange(axes, side.moves, side.table, side.read)
    for side in (shares.queries, shares.keys)
  )
  mine = jax.tree.map(lambda table: of_device(table, axes), tables)
  return Plan(decision.part, decision.tile, queries, keys, mine)


@functools.lru_cache(maxsize=64)
def _tables(executor, part, n, tile, num_devices, num_heads):
  """The tables of all devices, stacked."""
  layouts = share_cheapest(part, n, tile, num_devices).layouts
  tables = executor.shares(part, layouts, num_heads)
  return jax.tree.map(lambda *x: np.stack(x), *tables)
