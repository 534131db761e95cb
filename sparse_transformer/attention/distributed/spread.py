"""Positions split over devices: the assignment of work to devices.

Each part of a pattern runs in its own orders. Its tiles of queries are dealt
out to the devices in slices of that order. Which keys a device reads follows
from the layout, and `exchange` brings them there. Where the work is uneven, a
device may get one slice from each end instead; and where neither is cheap,
devices may exchange heads for positions: each then has all positions of some
heads. No pattern is named anywhere.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.content.selection import Directions
from sparse_transformer.attention.distributed import exchange
from sparse_transformer.attention.distributed.exchange import Exchange, Route
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles

# The cost of moving positions, including the backward pass: five arrays of
# queries and six of keys, per position, and products of seven matrices per
# pair. A byte, at 2 per element, takes as long as this many FLOPs: an H100 with
# NVLink and a TPU v5e do about as many at half of their peak rates.
QUERY_ARRAYS, KEY_ARRAYS, PRODUCTS, FLOPS_PER_BYTE = 5, 6, 7, 1000


@dataclasses.dataclass(frozen=True, eq=False)
class Shares:
  """How devices share a part."""

  # The queries of a device: "slices" of their order, one for each device;
  # "zigzag", one from each end; or "heads": all, of its heads.
  dealing: str
  tile: int  # positions on a side of a tile
  # The places of each device, and how they are filled; None for "heads".
  queries: Route | None = None
  keys: Route | None = None
  # The tiles of each device, by its places.
  layouts: tuple[Layout, ...] = ()

  @property
  def tiles(self) -> np.ndarray:
    """Number of tiles that each device computes."""
    return np.array([len(layout.rows) for layout in self.layouts])


def _cost(pairs, queries, keys):
  """Cost of a device that computes pairs and receives positions."""
  moved = QUERY_ARRAYS * queries + KEY_ARRAYS * keys
  return PRODUCTS * pairs + FLOPS_PER_BYTE * moved


def received_over_heads(n: int, num_devices: int) -> float:
  """Positions that a device receives, as a share of those of all heads."""
  return n * (num_devices - 1) / num_devices**2


def choose(
  part: Pattern, n: int, tile: int, num_devices: int, num_heads: int
) -> Shares:
  """The cheapest way to share a part, by the cost of the slowest device.

  Its key heads number `num_heads`.
  """

  def cost(x):
    pairs = x.tiles.max() * tile**2
    return _cost(pairs, x.queries.received, x.keys.received)

  best = share(part, n, tile, num_devices, "slices")
  mean = best.tiles.mean()
  if best.tiles.max() > mean:
    best = min(best, share(part, n, tile, num_devices, "zigzag"), key=cost)
  if num_heads % num_devices == 0:
    received = received_over_heads(n, num_devices)
    if _cost(mean * tile**2, received, received) < cost(best):
      return Shares("heads", tile)
  return best


@functools.lru_cache(maxsize=128)
def share(
  part: Pattern, n: int, tile: int, num_devices: int, dealing: str
) -> Shares:
  """The shares of a part of n positions, dealt in "slices" or "zigzag"."""
  layout, own = part.layout(n, tile), n // num_devices
  dealt = _deal(-(-n // tile), num_devices, dealing)
  place = np.argsort(dealt, axis=None)[layout.rows]
  device, rows = np.divmod(place, dealt.shape[1])
  places = _positions(layout.query_order, dealt, tile)
  queries = exchange.find_route(places.reshape(num_devices, -1), own)
  places, cols = _keys(part, layout, device, num_devices, own)
  keys = exchange.find_route(places, own)
  order = np.lexsort((rows, device))
  ends = np.searchsorted(device[order], range(1, num_devices))
  by_tile = rows, cols, layout.pairs, layout.full
  layouts = (
    Layout(tile, *orders, *(x[here] for x in by_tile))
    for *orders, here in zip(
      queries.positions, keys.positions, np.split(order, ends), strict=True
    )
  )
  return Shares(dealing, tile, queries, keys, tuple(layouts))


def _positions(order, tiles, tile):
  """The positions in tiles of an order, -1 for none: [..., tile]."""
  ranks = tiles[..., None] * tile + np.arange(tile)
  n = len(order)
  return np.where(ranks < n, order[ranks.clip(max=n - 1)], -1)


def _deal(num_rows, num_devices, dealing):
  """The tiles of queries of devices, [devices, tiles]; some do not exist."""
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
  device = np.where(pair % 2, num_devices - 1 - pair // 2, pair // 2)
  return dealt[np.argsort(device)]


def _keys(part, layout, device, num_devices, own):
  """(positions of keys [devices, places], the column there of each tile).

  A device has the columns of its tiles, its own positions first. Of other
  columns, it has only the keys that are in a pair.
  """
  n, tile = len(layout.key_order), layout.tile
  num_cols = -(-n // tile)
  columns = device * num_cols + layout.cols
  columns, number = np.unique(columns, return_inverse=True)
  owner, col = np.divmod(columns, num_cols)
  positions = _positions(layout.key_order, col, tile)
  is_away = ((positions // own != owner[:, None]) & (positions >= 0)).any(1)
  is_needed = np.repeat(~is_away[:, None], tile, axis=1)
  is_needed[number[layout.full]] = True
  partial = np.flatnonzero(~layout.full & is_away[number])
  rows, cols = layout.rows[partial], layout.cols[partial]
  orders = layout.query_order, layout.key_order
  for here, pairs in pairs_of_tiles(part, orders, tile, rows, cols):
    found, key = np.nonzero(pairs.any(1))
    is_needed[number[partial[here]][found], key] = True
  order = np.lexsort((is_away, owner))
  starts = np.searchsorted(owner, np.arange(num_devices + 1))
  place = np.empty(len(columns), int)
  place[order] = np.arange(len(columns)) - starts[owner[order]]
  size = max(1, np.diff(starts).max())
  places = np.full((num_devices, size, tile), -1)
  places[owner, place] = np.where(is_needed, positions, -1)
  return places.reshape(num_devices, -1), place[number]


def tile_of(
  executor: contract.Executor, part: Pattern, case: contract.Case, own: int
) -> int:
  """The tile of a part, if each device has `own` positions.

  A divisor of `own`, if there is a large one, so that no tile has positions of
  two devices. For kernels, it stays a power of two.
  """
  tile = executor.tile_size(part, case)
  if not tile & (tile - 1):
    divisor = math.gcd(tile, own)
    return divisor if divisor >= min(tile, 32) else tile
  return max(t for t in range(1, tile + 1) if own % t == 0 or t == tile // 4)


def decide(
  executor: contract.Executor,
  patterns: tuple[Pattern, ...],
  case: contract.Case,
  num_devices: int,
) -> Iterator[tuple[Pattern, contract.Heads, contract.Case, Shares]]:
  """The sharing of parts: (part, heads, the case with these alone, shares)."""
  n = case.length
  for part, heads in heads_of_parts(patterns, n):
    of_keys = key_heads(heads, case.group)
    count = len(patterns) if heads is None else len(heads)
    num = count // case.group if of_keys is None else len(of_keys)
    part_case = dataclasses.replace(case, num_heads=count, num_key_heads=num)
    size = tile_of(executor, part, case, n // num_devices)
    yield part, heads, part_case, choose(part, n, size, num_devices, num)


def plans(
  executor: contract.Executor,
  patterns: tuple[Pattern, ...],
  case: contract.Case,
  axes: contract.Axes,
) -> contract.Plans:
  """`Executor.plans` of a device, for a case with the device's own length."""
  num_devices = lax.axis_size(axes)
  if not hasattr(executor, "shares"):
    raise ValueError(
      f"positions are split over {num_devices} devices, but the executor"
      " has no method `shares`; use another backend"
    )
  case = dataclasses.replace(case, length=case.length * num_devices)
  found: list[tuple[contract.Plan, contract.Heads]] = []
  shared = decide(executor, patterns, case, num_devices)
  for part, heads, part_case, shares in shared:
    if shares.queries is None or shares.keys is None:
      few, num = (
        x // num_devices for x in (part_case.num_heads, part_case.num_key_heads)
      )
      few_case = dataclasses.replace(case, num_heads=few, num_key_heads=num)
      for plan, _ in executor.plans((part,) * few, few_case):
        of_queries = exchange.OverHeads(axes, plan.queries)
        of_keys = exchange.OverHeads(axes, plan.keys)
        plan = dataclasses.replace(plan, queries=of_queries, keys=of_keys)
        found.append((plan, heads))
    else:
      key: Any = executor, part, shares, part_case
      of_device = functools.partial(exchange.of_device, axes=axes)
      tables = jax.tree.map(of_device, _tables(*key))
      routes = (Exchange(axes, x) for x in (shares.queries, shares.keys))
      queries, keys = routes
      plan = contract.Plan(part, shares.tile, tables, queries, keys)
      found.append((plan, heads))
  return found


def of_own_heads(
  patterns: tuple[Pattern, ...],
  num_key_heads: int,
  directions: Directions,
  axes: contract.Axes,
) -> tuple[tuple[Pattern, ...], Directions]:
  """Patterns and directions of a device's heads, if it has all positions."""
  num_devices = lax.axis_size(axes)
  few = len(patterns) // num_devices
  is_alike = patterns[:few] * num_devices == patterns
  if not is_alike or num_key_heads > 1 and num_key_heads % num_devices:
    raise ValueError(
      "content-based patterns need all positions of a head on one"
      f" device, but {len(patterns)} heads cannot be split over"
      f" {num_devices} devices so that all have the same patterns, and as many"
      f" of the {num_key_heads} key heads; split positions over fewer devices,"
      " or change the number of heads"
    )
  first = lax.axis_index(axes) * few
  return patterns[:few], {
    pattern: given
    if len(given) == 1
    else lax.dynamic_slice_in_dim(given, first, few)
    for pattern, given in directions.items()
  }


@functools.lru_cache(maxsize=64)
def _tables(executor, part, shares, case):
  """The tables of all devices, stacked."""
  tables = executor.shares(part, shares.layouts, case)
  return jax.tree.map(lambda *x: np.stack(x), *tables)
