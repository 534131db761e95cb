"""Positions split over devices: who computes which tiles, from which keys.

A sequence is split in order over S devices; each holds `own` positions. A part
is divided into slices of positions, or into heads where a `Route` would be
long. All of it runs within `jax.shard_map`; `axes` split positions.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, heads as heads_lib
from sparse_transformer.attention.contract import Axes, Table
from sparse_transformer.attention.orders import Arrangement
from sparse_transformer.patterns import Layout, Pattern
from sparse_transformer.patterns.layout import pairs_of_tiles

MAX_SHIFTS = 8  # messages, one after another


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Route:
  """How devices get the positions that they need: in a few messages each.

  All of it is found on the host, from the pattern: at run time, devices only
  take the rows they send, send them, and take those they need.
  """

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
  """Finds the messages that bring devices their positions.

  Args:
    positions: int [S, places], the position that each place of a device needs,
      -1 for none; none of them twice on a device.
    own: positions that each device holds; device d has those from d * own on.
  """
  num_devices = len(positions)
  device = np.arange(num_devices)[:, None]
  holders = np.where(positions < 0, device, positions // own)

  # What is read from other devices, by reader and then by holder.
  reader, place = np.nonzero(holders != device)
  by_holder = np.lexsort((holders[reader, place], reader))
  reader = reader[by_holder]
  place = place[by_holder]
  holder = holders[reader, place]

  # Its number among what a reader has from a holder, and its message.
  pair = reader * num_devices + holder
  counts = np.bincount(pair, minlength=num_devices**2)
  number = np.arange(len(pair)) - (np.cumsum(counts) - counts)[pair]
  sizes, shifts = _find_messages(counts.reshape(num_devices, num_devices))

  # A row is in the same place of a message when it is sent and when it arrives.
  # Where each device has a message of its own, the senders' are by receiver,
  # and the receivers' by sender.
  starts = np.cumsum([0, *sizes])
  if shifts is None:
    sent_at = starts[reader] + number
    received_at = starts[holder] + number
  else:
    message = np.searchsorted(shifts, (reader - holder) % num_devices)
    sent_at = received_at = starts[message] + number

  # Messages are as long as the longest of any device, and padded with rows that
  # do not exist. What is received comes after the device's own positions.
  read = np.where(positions < 0, -1, positions % own).astype(np.int32)
  nothing = own + np.arange(starts[-1], dtype=np.int32)
  sent = np.tile(nothing, (num_devices, 1))
  sent[holder, sent_at] = read[reader, place]
  read[reader, place] = own + received_at
  return Route(
    positions=positions.astype(np.int32),
    own=own,
    sizes=sizes,
    shifts=shifts,
    sent=sent,
    read=read,
  )


def _find_messages(counts):
  """Chooses between a message to each device, and one to some neighbors.

  Args:
    counts: int [to, from], how many positions each device reads from another.

  Returns:
    (sizes, shifts), see `Route`.
  """
  # Messages by shift are few where a pattern is local: each device reads from
  # those a little before it.
  num_devices = len(counts)
  device = np.arange(num_devices)
  longest = []
  for shift in range(num_devices):
    read = counts[device, device - shift]
    longest.append(int(read.max()))
  shifts = tuple(np.flatnonzero(longest).tolist())

  # A message to each device, all as long as the longest, is one operation.
  most = int(counts.max())
  is_longer = (sum(longest), len(shifts)) > ((num_devices - 1) * most, 1)
  if is_longer or len(shifts) > MAX_SHIFTS:
    return (most,) * num_devices, None
  return tuple(longest[shift] for shift in shifts), shifts


def of_device(table: np.ndarray, axes: Axes) -> Table:
  """A device's row of a table [devices, ...]; a constant if all are equal."""
  if (table == table[:1]).all():
    return table[0]
  return jnp.asarray(table)[lax.axis_index(axes)]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange(Arrangement):
  """An order of positions that are spread over devices.

  `restore` is the transpose of `arrange`: what a row gets, it adds to the
  position from which the row came.
  """

  axes: Axes
  route: Route

  @property
  def positions(self) -> Table:
    return of_device(self.route.positions, self.axes)

  def arrange(self, arrays: Any) -> Any:
    sent = of_device(self.route.sent, self.axes)
    read = of_device(self.route.read, self.axes)

    def arrange_array(x):
      if self.route.sizes:
        received = self._send(_take(x, sent))
        x = jnp.concatenate([x, received], 1)
      return _take(x, read)

    return jax.tree.map(arrange_array, arrays)

  def restore(self, arrays: Any) -> Any:
    """Adds results on the devices that hold their positions."""
    # First back into the places in which rows were held, then onto their own.
    route = self.route
    inverse = _inverse(route.read, route.own + route.sent.shape[1])
    place = of_device(inverse, self.axes)

    def restore_array(x):
      held = _take(x, place)
      total = held[:, : route.own]
      if not route.sizes:
        return total

      came = self._send(held[:, route.own :], step=-1)
      # One message after another: a row that several have read is then added in
      # the same order each time, and never twice in one operation.
      first = 0
      for size in route.sizes:
        message = slice(first, first + size)
        at = of_device(route.sent[:, message], self.axes)
        total = total.at[:, at].add(
          came[:, message],
          mode="drop",
          unique_indices=True,
        )
        first += size
      return total

    return jax.tree.map(restore_array, arrays)

  def _send(self, x_BL, step=1):
    """Sends messages or, with a step of -1, what was added to them back."""
    route = self.route
    if route.shifts is None:
      return lax.all_to_all(x_BL, self.axes, 1, 1, tiled=True)

    # A permutation for each message: device d sends to d + shift.
    num_devices = len(route.sent)
    ends = np.cumsum(route.sizes)
    messages = jnp.split(x_BL, ends[:-1], axis=1)
    came = []
    for message, shift in zip(messages, route.shifts, strict=True):
      to_of = []
      for device in range(num_devices):
        to = (device + step * shift) % num_devices
        to_of.append((device, to))
      came.append(lax.ppermute(message, self.axes, to_of))
    return jnp.concatenate(came, 1)


def _take(x_BL, at):
  """Rows of x, 0 where `at` is out of range or -1."""
  # A constant that takes all rows in order needs no copy.
  n = x_BL.shape[1]
  if isinstance(at, np.ndarray) and np.array_equal(at, range(n)):
    return x_BL
  at = jnp.where(at < 0, n, at)
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
  order: Arrangement  # on one device

  @property
  def positions(self) -> Table:
    return self.order.positions

  def arrange(self, arrays: Any) -> Any:
    return self.order.arrange(to_heads(self.axes, arrays))

  def restore(self, arrays: Any) -> Any:
    return to_positions(self.axes, self.order.restore(arrays))


def to_heads(axes: Axes, arrays: Any) -> Any:
  """Exchanges a share of the positions of all heads for all of some heads.

  Args:
    axes: the axes of the mesh that split positions.
    arrays: a pytree of arrays [B, own, H, ...]. An array with a single head, as
      segments, is gathered on all devices.

  Returns:
    Arrays [B, L, H / S, ...], in which device i has the i-th share of heads.
  """

  def exchange(x_BLH):
    if x_BLH.shape[2] == 1:
      return lax.all_gather(x_BLH, axes, axis=1, tiled=True)
    return lax.all_to_all(x_BLH, axes, 2, 1, tiled=True)

  return jax.tree.map(exchange, arrays)


def to_positions(axes: Axes, arrays: Any) -> Any:
  """Undoes `to_heads`."""
  return jax.tree.map(
    lambda x: lax.all_to_all(x, axes, 1, 2, tiled=True),
    arrays,
  )


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
  """Deals out the tiles of a part to devices, in equal slices of its order.

  Each device computes the tiles of its own queries, so that nothing is summed
  over devices in the forward pass.

  Args:
    part: the part of a pattern.
    n: positions of a sequence, a multiple of the devices.
    tile: positions on a side of a tile.
    num_devices: devices, S.
  """
  layout = part.layout(n, tile)
  own = n // num_devices
  num_rows = -(-n // (tile * num_devices))  # tiles of queries of a device
  device, rows = np.divmod(layout.rows, num_rows)

  # Who computes which queries, and the keys that these need.
  dealt = np.arange(num_devices * num_rows)
  query_positions = _positions(layout.query_order, dealt, tile)
  queries = find_route(query_positions.reshape(num_devices, -1), own)
  key_positions, cols = _keys(part, layout, device, num_devices, own)
  keys = find_route(key_positions, own)

  # The tiles of each device, sorted by row as a layout's are.
  order = np.lexsort((rows, device))
  ends = np.searchsorted(device[order], range(1, num_devices))
  layouts = []
  for i, here in enumerate(np.split(order, ends)):
    layout_here = Layout(
      tile=tile,
      query_order=queries.positions[i],
      key_order=keys.positions[i],
      rows=rows[here],
      cols=cols[here],
      pairs=layout.pairs[here],
      full=layout.full[here],
    )
    layouts.append(layout_here)
  return Slices(queries, keys, tuple(layouts))


def _positions(order, tiles, tile):
  """The positions in tiles of an order, -1 for none: [tiles, tile]."""
  ranks = tiles[:, None] * tile + np.arange(tile)
  n = len(order)
  return np.where(ranks < n, order[ranks.clip(max=n - 1)], -1)


def _keys(part, layout, device, num_devices, own):
  """Finds the keys that each device needs.

  Args:
    part: the part of a pattern.
    layout: its tiles.
    device: int [tiles], the device that computes each tile.
    num_devices: devices, S.
    own: positions that each device holds.

  Returns:
    The positions of keys at the places of each device, int [S, places], -1 for
    keys that no query needs; and the column of each tile among these, int
    [tiles].
  """
  tile = layout.tile
  num_cols = -(-len(layout.key_order) // tile)

  # The different columns of all devices, and which of them each tile has.
  columns, column_of_tile = np.unique(
    device * num_cols + layout.cols, return_inverse=True
  )
  owner, col = np.divmod(columns, num_cols)
  positions = _positions(layout.key_order, col, tile)

  # A column whose positions all lie on its device is needed whole. Of any
  # other, only keys that are in a pair are sent: a strided column of a tile may
  # have a single one. A full tile needs every key.
  is_of_other = (positions // own != owner[:, None]) & (positions >= 0)
  is_away = is_of_other.any(1)
  is_needed = np.repeat(~is_away[:, None], tile, axis=1)
  is_needed[column_of_tile[layout.full]] = True
  partial = np.flatnonzero(~layout.full & is_away[column_of_tile])
  for here, pairs in pairs_of_tiles(
    part,
    (layout.query_order, layout.key_order),
    tile,
    layout.rows[partial],
    layout.cols[partial],
  ):
    row, key = np.nonzero(pairs.any(1))
    is_needed[column_of_tile[partial[here]][row], key] = True

  # The columns of a device follow each other.
  starts = np.searchsorted(owner, np.arange(num_devices + 1))
  place = np.arange(len(columns)) - starts[owner]
  most_columns = max(1, np.diff(starts).max())
  places = np.full((num_devices, most_columns, tile), -1)
  places[owner, place] = np.where(is_needed, positions, -1)
  return places.reshape(num_devices, -1), place[column_of_tile]


def plan_device(
  backend: contract.Backend, request: contract.Request
) -> contract.Plans:
  """`Backend.plans` of a device, where positions are split.

  Parts run in slices, or by heads where key heads divide and slices would bring
  a device more positions than it has.
  """
  axes = request.split.over_positions
  num_devices = lax.axis_size(axes)
  own = request.length // num_devices
  plans: list[tuple[contract.Plan, contract.Heads]] = []
  for part, heads in heads_lib.heads_of_parts(request.patterns, request.length):
    of_part = heads_lib.request_of(request, part, heads)
    tile = _divisor_tile(backend, part, of_part, own)
    slices = slice_part(part, request.length, tile, num_devices)

    # All keys for some heads, where slices would need nearly all keys as well.
    can_split_heads = of_part.num_key_heads % num_devices == 0
    if slices.received > own and can_split_heads:
      for plan in _plan_heads(backend, part, of_part):
        plans.append((plan, heads))
      continue

    # Backends are frozen, and so hashable, which their protocol does not say.
    hashable: Any = backend
    tables = _tables(hashable, part, slices, of_part)
    plan = contract.Plan(
      pattern=part,
      tile=tile,
      tables=jax.tree.map(lambda x: of_device(x, axes), tables),
      queries=Exchange(axes, slices.queries),
      keys=Exchange(axes, slices.keys),
    )
    plans.append((plan, heads))
  return plans


def _divisor_tile(backend, part, request, own):
  """A tile that divides a device's `own` positions, unless it is too small."""
  # Tiles within a device's positions are not padded.
  tile = backend.tile_size(part, request)
  divisor = math.gcd(tile, own)
  return divisor if divisor >= min(tile, backend.smallest_tile) else tile


def _plan_heads(backend, part, request):
  """Plans of a part for a device's share of the heads, at all positions."""
  axes = request.split.over_positions
  num_devices = lax.axis_size(axes)
  of_device = dataclasses.replace(
    request,
    patterns=(part,) * (request.num_heads // num_devices),
    num_key_heads=request.num_key_heads // num_devices,
  )
  for plan, _ in backend.plans(of_device):
    yield dataclasses.replace(
      plan,
      queries=OverHeads(axes, plan.queries),
      keys=OverHeads(axes, plan.keys),
    )


@functools.lru_cache(maxsize=64)
def _tables(backend, part, slices, request):
  """The tables of all devices, stacked: arrays [S, ...].

  Kept: several layers, and both passes, ask for the same.
  """
  tables = backend.device_tables(part, slices.layouts, request)
  return jax.tree.map(lambda *x: np.stack(x), *tables)


def own_heads(
  request: contract.Request, arrays: Any
) -> tuple[contract.Request, Any]:
  """The request of a device's heads at all positions, and their arrays.

  Every device runs the same program, and so the same patterns.

  Args:
    request: that of all heads.
    arrays: a pytree of arrays [heads, ...], or [1, ...] for all heads; those of
      4 axes have sequences first.

  Raises:
    ValueError: the heads cannot be split so that devices have equal patterns.
  """
  axes = request.split.over_positions
  num_devices = lax.axis_size(axes)
  num_heads = request.num_heads // num_devices
  num_key_heads = request.num_key_heads
  patterns = request.patterns[:num_heads]
  is_alike = patterns * num_devices == request.patterns
  if not is_alike or num_key_heads > 1 and num_key_heads % num_devices:
    raise ValueError(
      "content-based patterns and a bias need all positions of a head on one"
      f" device, but {request.num_heads} heads cannot be split over"
      f" {num_devices} devices so that each has the same patterns, and equally"
      f" many of the {num_key_heads} key heads; split positions over fewer"
      " devices"
    )

  first = lax.axis_index(axes) * num_heads

  def take(x):
    axis = max(0, x.ndim - 3)
    if x.shape[axis] == 1:
      return x
    return lax.dynamic_slice_in_dim(x, first, num_heads, axis)

  own_request = dataclasses.replace(
    request,
    patterns=patterns,
    # `to_heads` gives a single key head to all devices.
    num_key_heads=max(1, num_key_heads // num_devices),
    split=contract.Split(),
  )
  return own_request, jax.tree.map(take, arrays)
