"""Positions split over devices: who computes which tiles, from which keys.

Each part of a pattern runs in its own orders. Its tiles of queries are dealt
out to the devices in slices of that order. Which keys a device reads follows
from the layout, and `exchange` brings them there. Where these are many, devices
exchange heads for positions if they can: each then has all positions of some
heads. No pattern is named anywhere.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, exchange
from sparse_transformer.attention.exchange import Exchange, OverHeads, Route
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
  """A part, dealt out to devices in slices of the order of its queries."""

  # The places of each device, and how they are filled.
  queries: Route
  keys: Route
  layouts: tuple[Layout, ...]  # the tiles of each device, by its places

  @property
  def received(self) -> int:
    """Positions of queries and of keys that a device receives."""
    return self.queries.received + self.keys.received


@functools.lru_cache(maxsize=128)
def slice_part(part: Pattern, n: int, tile: int, num_devices: int) -> Slices:
  """Deals out the tiles of a part of n positions."""
  layout, own = part.layout(n, tile), n // num_devices
  size = -(-n // (tile * num_devices))  # tiles of queries of a device
  dealt = np.arange(num_devices * size).reshape(num_devices, size)
  device, rows = np.divmod(layout.rows, size)
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
  return Slices(queries, keys, tuple(layouts))


def _positions(order, tiles, tile):
  """The positions in tiles of an order, -1 for none: [..., tile]."""
  ranks = tiles[..., None] * tile + np.arange(tile)
  n = len(order)
  return np.where(ranks < n, order[ranks.clip(max=n - 1)], -1)


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


def plan_device(
  executor: contract.Executor,
  patterns: tuple[Pattern, ...],
  case: contract.Case,
  axes: contract.Axes,
) -> contract.Plans:
  """`Executor.plans` of a device; the case has the length of all positions.

  Within `jax.shard_map`. Parts run in slices, or by heads where key heads
  divide and slices would bring a device more positions than it has.
  """
  num_devices = lax.axis_size(axes)
  if not hasattr(executor, "shares"):
    raise ValueError(
      f"positions are split over {num_devices} devices, but the executor"
      " has no method `shares`; use another backend"
    )
  found: list[tuple[contract.Plan, contract.Heads]] = []
  own = case.length // num_devices
  for part, heads in heads_of_parts(patterns, case.length):
    tile = _tile_of(executor, part, case, own)
    slices = slice_part(part, case.length, tile, num_devices)
    of_part = _with_heads(case, patterns, heads)
    if slices.received > own and of_part.num_key_heads % num_devices == 0:
      plans = _plan_heads(executor, part, of_part, axes)
      found.extend((plan, heads) for plan in plans)
      continue
    of_device = functools.partial(exchange.of_device, axes=axes)
    key: Any = executor, part, slices, of_part
    tables = jax.tree.map(of_device, _tables(*key))
    queries, keys = (Exchange(axes, x) for x in (slices.queries, slices.keys))
    found.append((contract.Plan(part, tile, tables, queries, keys), heads))
  return found


def _with_heads(case, patterns, heads):
  """The case with some heads alone."""
  of_keys = key_heads(heads, case.group)
  count = len(patterns) if heads is None else len(heads)
  num = count // case.group if of_keys is None else len(of_keys)
  return dataclasses.replace(case, num_heads=count, num_key_heads=num)


def _tile_of(executor, part, case, own):
  """The tile of a part, if each device has `own` positions.

  A divisor of `own`, if there is a large one, so that no tile has positions of
  two devices. For kernels, it stays a power of two.
  """
  tile = executor.tile_size(part, case)
  if not tile & (tile - 1):
    divisor = math.gcd(tile, own)
    return divisor if divisor >= min(tile, 32) else tile
  return max(t for t in range(1, tile + 1) if own % t == 0 or t == tile // 4)


def _plan_heads(executor, part, case, axes):
  """Plans of a part for a device's share of the heads, at all positions."""
  few, num = (
    x // lax.axis_size(axes) for x in (case.num_heads, case.num_key_heads)
  )
  case = dataclasses.replace(case, num_heads=few, num_key_heads=num)
  for plan, _ in executor.plans((part,) * few, case):
    queries, keys = (OverHeads(axes, x) for x in (plan.queries, plan.keys))
    yield dataclasses.replace(plan, queries=queries, keys=keys)


@functools.lru_cache(maxsize=64)
def _tables(executor, part, slices, case):
  """The tables of all devices, stacked."""
  tables = executor.shares(part, slices.layouts, case)
  return jax.tree.map(lambda *x: np.stack(x), *tables)


def own_heads(
  patterns: tuple[Pattern, ...],
  num_key_heads: int,
  given: Mapping[Pattern, jax.Array],
  axes: contract.Axes,
) -> tuple[tuple[Pattern, ...], dict[Pattern, jax.Array]]:
  """The patterns of a device's heads, and what is given for them.

  For content-based patterns, which need all positions of a head.
  """
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
    pattern: x if len(x) == 1 else lax.dynamic_slice_in_dim(x, first, few)
    for pattern, x in given.items()
  }
