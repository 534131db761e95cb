"""Positions split over devices: who computes which tiles, from which keys.

A sequence is split in order over S devices; each holds `own` positions. A part
is divided into slices of positions, or into heads where a `Route` would be
long. All of it runs within `jax.shard_map`; `axes` split positions.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.contract import Axes, Table
from sparse_transformer.attention.heads import heads_of_parts, key_heads
from sparse_transformer.attention.orders import Arrangement
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles

MAX_SHIFTS = 8  # messages, one after another


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
  """How devices get the positions that they need: in a few messages each."""

  # int32 [S, places], the position at each place of a device, -1 for none.
  positions: np.ndarray
  own: int  # positions that each device holds
  # The number of positions in each message, the same on all devices.
  sizes: tuple[int, ...]
  # How many devices further each message goes; None if the i-th message of a
  # device goes to device i.
  shifts: tuple[int, ...] | None
  # int32 [S, sent], which places of its part a device sends; numbers from
  # `own` on send nothing.
  sent: np.ndarray
  # int32 [S, places], where each place is among what a device has, its own
  # positions followed by those that it received; -1 for none.
  read: np.ndarray

  @property
  def received(self) -> int:
    """Positions that a device receives from others."""
    return sum(self.sizes if self.shifts is not None else self.sizes[1:])


def find_route(positions: np.ndarray, own: int) -> Route:
  """The `Route` to positions, none of them twice on a device."""
  num_devices = len(positions)
  device = np.arange(num_devices)[:, None]
  holders = np.where(positions < 0, device, positions // own)
  reader, place = np.nonzero(holders != device)
  order = np.lexsort((holders[reader, place], reader))
  reader, place = reader[order], place[order]
  holder = holders[reader, place]
  pair = reader * num_devices + holder
  counts = np.bincount(pair, minlength=num_devices**2)
  sizes, shifts = _find_messages(counts.reshape(num_devices, num_devices))
  starts = np.cumsum([0, *sizes])
  number = np.arange(len(pair)) - (np.cumsum(counts) - counts)[pair]
  if shifts is None:
    sent_at, received_at = starts[reader] + number, starts[holder] + number
  else:
    message = np.searchsorted(shifts, (reader - holder) % num_devices)
    sent_at = received_at = starts[message] + number
  read = np.where(positions < 0, -1, positions % own).astype(np.int32)
  sent = np.tile(own + np.arange(starts[-1], dtype=np.int32), (num_devices, 1))
  sent[holder, sent_at] = read[reader, place]
  read[reader, place] = own + received_at
  return Route(positions.astype(np.int32), own, sizes, shifts, sent, read)


def _find_messages(counts):
  """(sizes, shifts) of messages by which devices read counts[to, from]."""
  num_devices, most = len(counts), int(counts.max())
  to = np.arange(num_devices)
  longest = [int(counts[to, to - shift].max()) for shift in to]
  shifts = tuple(np.flatnonzero(longest).tolist())
  is_worse = (sum(longest), len(shifts)) > ((num_devices - 1) * most, 1)
  if is_worse or len(shifts) > MAX_SHIFTS:
    return (most,) * num_devices, None
  return tuple(longest[shift] for shift in shifts), shifts


def of_device(table: np.ndarray, axes: Axes) -> Table:
  """A device's row of a table [devices, ...]; a constant if all are equal."""
  if (table == table[:1]).all():
    return table[0]
  return jnp.asarray(table)[lax.axis_index(axes)]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange(Arrangement):
  """An order of positions that are spread over devices."""

  axes: Axes
  route: Route

  @property
  def positions(self) -> Table:
    return of_device(self.route.positions, self.axes)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if self.route.sizes:
      at = of_device(self.route.sent, self.axes)
      arrays = tuple(
        jnp.concatenate([x, self._send(_take(x, at))], 1) for x in arrays
      )
    at = of_device(self.route.read, self.axes)
    return tuple(_take(x, at) for x in arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Adds results on the devices that hold their positions."""
    route, own = self.route, self.route.own
    at = of_device(_inverse(route.read, own + route.sent.shape[1]), self.axes)
    held = [_take(x, at) for x in arrays]
    totals = [x[:, :own] for x in held]
    if not route.sizes:
      return tuple(totals)
    came = [self._send(x[:, own:], step=-1) for x in held]
    # One message after another: a row that several have read is then added in
    # the same order each time, and never twice in one operation.
    ends = np.cumsum(route.sizes)
    for first, last in zip(ends - route.sizes, ends, strict=True):
      at = of_device(route.sent[:, first:last], self.axes)
      totals = [
        x.at[:, at].add(new[:, first:last], mode="drop", unique_indices=True)
        for x, new in zip(totals, came, strict=True)
      ]
    return tuple(totals)

  def _send(self, x_BL, step=1):
    """Sends messages or, with a step of -1, what was added to them back."""
    if self.route.shifts is None:
      return lax.all_to_all(x_BL, self.axes, 1, 1, tiled=True)
    devices = range(len(self.route.sent))
    pieces = jnp.split(x_BL, np.cumsum(self.route.sizes)[:-1], axis=1)
    came = [
      lax.ppermute(
        x, self.axes, [(i, (i + step * shift) % len(devices)) for i in devices]
      )
      for x, shift in zip(pieces, self.route.shifts, strict=True)
    ]
    return jnp.concatenate(came, 1)


def _take(x_BL, at):
  """Rows of x, 0 where `at` is out of range or -1."""
  if isinstance(at, np.ndarray) and np.array_equal(at, range(x_BL.shape[1])):
    return x_BL
  at = jnp.where(at < 0, x_BL.shape[1], at)
  return jnp.take(x_BL, at, axis=1, mode="fill", fill_value=0)


def _inverse(read, num_held):
  """Where each place of what is held is read, -1 for nowhere."""
  devices, places = np.nonzero(read >= 0)
  inverse = np.full((len(read), num_held), -1, np.int32)
  inverse[devices, read[devices, places]] = places
  return inverse


@dataclasses.dataclass(frozen=True, eq=False)
class OverHeads(Arrangement):
  """An order of all positions: each device gets them for its share of heads."""

  axes: Axes
  order: Any  # an `Arrangement` on one device

  @property
  def positions(self) -> Table:
    return self.order.positions

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return self.order.arrange(*to_heads(self.axes, *arrays))

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return to_positions(self.axes, *self.order.restore(*arrays))


def to_heads(axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """All positions of a device's heads, or of a single head for all devices."""

  def of_array(x_BLH):
    if x_BLH.shape[2] == 1:
      return lax.all_gather(x_BLH, axes, axis=1, tiled=True)
    return lax.all_to_all(x_BLH, axes, 2, 1, tiled=True)

  return tuple(map(of_array, arrays))


def to_positions(axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Undoes `to_heads`."""
  return tuple(lax.all_to_all(x, axes, 1, 2, tiled=True) for x in arrays)


@dataclasses.dataclass(frozen=True, eq=False)
class Slices:
  """A part, dealt out to devices in slices of the order of its queries."""

  queries: Route
  keys: Route
  layouts: tuple[Layout, ...]  # the tiles of each device, by its places

  @property
  def received(self) -> int:
    return self.queries.received + self.keys.received


@functools.lru_cache(maxsize=128)
def slice_part(part: Pattern, n: int, tile: int, num_devices: int) -> Slices:
  """Deals out the tiles of a part of n positions."""
  layout, own = part.layout(n, tile), n // num_devices
  size = -(-n // (tile * num_devices))  # tiles of queries of a device
  dealt = np.arange(num_devices * size).reshape(num_devices, size)
  device, rows = np.divmod(layout.rows, size)
  places = _positions(layout.query_order, dealt, tile)
  queries = find_route(places.reshape(num_devices, -1), own)
  places, cols = _keys(part, layout, device, num_devices, own)
  keys = find_route(places, own)
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
  """(positions of keys [devices, places], each tile's column among them)."""
  tile = layout.tile
  num_cols = -(-len(layout.key_order) // tile)
  columns = device * num_cols + layout.cols
  columns, number = np.unique(columns, return_inverse=True)
  owner, col = np.divmod(columns, num_cols)
  positions = _positions(layout.key_order, col, tile)
  is_away = ((positions // own != owner[:, None]) & (positions >= 0)).any(1)
  # Of columns with other devices' positions, only keys that are in a pair.
  is_needed = np.repeat(~is_away[:, None], tile, axis=1)
  is_needed[number[layout.full]] = True
  partial = np.flatnonzero(~layout.full & is_away[number])
  rows, cols = layout.rows[partial], layout.cols[partial]
  orders = layout.query_order, layout.key_order
  for here, pairs in pairs_of_tiles(part, orders, tile, rows, cols):
    found, key = np.nonzero(pairs.any(1))
    is_needed[number[partial[here]][found], key] = True
  starts = np.searchsorted(owner, np.arange(num_devices + 1))
  place = np.arange(len(columns)) - starts[owner]
  size = max(1, np.diff(starts).max())
  places = np.full((num_devices, size, tile), -1)
  places[owner, place] = np.where(is_needed, positions, -1)
  return places.reshape(num_devices, -1), place[number]


def plan_device(
  executor: contract.Executor,
  patterns: tuple[Pattern, ...],
  case: contract.Case,
  axes: Axes,
) -> contract.Plans:
  """`Executor.plans` of a device, of a case with the length of all positions.

  Parts run in slices, or by heads where key heads divide and slices would bring
  a device more positions than it has.
  """
  num_devices = lax.axis_size(axes)
  shares = getattr(executor, "shares", None)  # of a module, or a bound method
  if getattr(shares, "__func__", shares) in (None, contract.Executor.shares):
    raise ValueError(
      "the executor cannot split positions over devices: it has no method"
      " `shares`; use another backend"
    )
  found: list[tuple[contract.Plan, contract.Heads]] = []
  own = case.length // num_devices
  for part, heads in heads_of_parts(patterns, case.length):
    tile = _tile_of(executor, part, case, own)
    slices = slice_part(part, case.length, tile, num_devices)
    of_part = case
    if heads is not None:
      few, of_keys = len(heads), len(key_heads(heads, case.group) or ())
      of_part = dataclasses.replace(case, num_heads=few, num_key_heads=of_keys)
    if slices.received > own and of_part.num_key_heads % num_devices == 0:
      plans = _plan_heads(executor, part, of_part, axes)
      found.extend((plan, heads) for plan in plans)
      continue
    key: Any = executor, part, slices, of_part
    tables = jax.tree.map(lambda x: of_device(x, axes), _tables(*key))
    orders = Exchange(axes, slices.queries), Exchange(axes, slices.keys)
    found.append((contract.Plan(part, tile, tables, *orders), heads))
  return found


def _tile_of(executor, part, case, own):
  """A tile that divides a device's `own` positions, unless it is too small."""
  tile = executor.tile_size(part, case)
  divisor, least = math.gcd(tile, own), getattr(executor, "SMALLEST", 32)
  return divisor if divisor >= min(tile, least) else tile


def _plan_heads(executor, part, case, axes):
  """Plans of a part for a device's share of the heads, at all positions."""
  num_devices = lax.axis_size(axes)
  few = case.num_heads // num_devices
  of_keys = case.num_key_heads // num_devices
  case = dataclasses.replace(case, num_heads=few, num_key_heads=of_keys)
  for plan, _ in executor.plans((part,) * few, case):
    queries, keys = (OverHeads(axes, x) for x in (plan.queries, plan.keys))
    yield dataclasses.replace(plan, queries=queries, keys=keys)


@functools.lru_cache(maxsize=64)
def _tables(executor, part, slices, case):
  tables = executor.shares(part, slices.layouts, case)
  return jax.tree.map(lambda *x: np.stack(x), *tables)


def own_heads(
  patterns: tuple[Pattern, ...],
  num_key_heads: int,
  given: Mapping[Pattern, jax.Array],
  axes: Axes,
) -> tuple[tuple[Pattern, ...], dict[Pattern, jax.Array]]:
  """Content-based patterns of a device's heads, and what is given for them."""
  num_devices = lax.axis_size(axes)
  few = len(patterns) // num_devices
  is_alike = patterns[:few] * num_devices == patterns
  if not is_alike or num_key_heads > 1 and num_key_heads % num_devices:
    raise ValueError(
      "content-based patterns need all positions of a head on one device, but"
      f" {len(patterns)} heads cannot be split over {num_devices} devices so"
      " that each has the same patterns, and equally many of the"
      f" {num_key_heads} key heads; split positions over fewer devices"
    )
  first = lax.axis_index(axes) * few
  return patterns[:few], {
    pattern: x if len(x) == 1 else lax.dynamic_slice_in_dim(x, first, few)
    for pattern, x in given.items()
  }
