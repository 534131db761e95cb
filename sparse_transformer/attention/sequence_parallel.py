"""Positions split over devices: which device computes which tiles.

A sequence is split over S devices, in natural order, so that each device stores
`own` consecutive positions. The work for each part of a pattern is divided over
devices, into slices of positions. If slices would require devices to exchange
too many positions, the work is divided by head instead. The code runs within
`jax.shard_map`; `axes` are the mesh axes that split positions.
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

MAX_SHIFTS = 8  # the most messages that are sent one after another


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Route:
  """The messages that bring each device the positions that it needs.

  The route is computed on the host, from the pattern. At run time, a device
  only gathers the rows that it sends, exchanges messages, and gathers the rows
  that it needs.
  """

  # int32 [S, places], the position that each place of a device needs, -1 for
  # none.
  positions: np.ndarray
  own: int  # number of positions that each device stores
  # The number of positions in each message, which is equal on all devices.
  sizes: tuple[int, ...]
  # For each message, the difference between the receiving and the sending
  # device. None if the i-th message of each device goes to device i.
  shifts: tuple[int, ...] | None
  # int32 [S, sent], the indices of the stored rows that a device sends. Indices
  # of at least `own` send nothing.
  sent: np.ndarray
  # int32 [S, places], the index of the row for each place, among the stored
  # rows followed by the received rows; -1 for none.
  read: np.ndarray

  @property
  def received(self) -> int:
    """The number of positions that a device receives from others."""
    return sum(self.sizes if self.shifts is not None else self.sizes[1:])


def find_route(positions: np.ndarray, own: int) -> Route:
  """Finds the messages that bring each device the positions that it needs.

  Args:
    positions: int [S, places], the position that each place of a device needs,
      -1 for none. A device must not need a position twice.
    own: number of positions that each device stores; device d stores the
      positions from d * own to (d + 1) * own - 1.
  """
  num_devices = len(positions)
  device = np.arange(num_devices)[:, None]
  holders = np.where(positions < 0, device, positions // own)

  # Sort the rows that are read from other devices, by reader and then by
  # holder.
  reader, place = np.nonzero(holders != device)
  by_holder = np.lexsort((holders[reader, place], reader))
  reader = reader[by_holder]
  place = place[by_holder]
  holder = holders[reader, place]

  # Find the index of each row among those that its reader needs from its
  # holder, and the sizes of messages.
  pair = reader * num_devices + holder
  counts = np.bincount(pair, minlength=num_devices**2)
  number = np.arange(len(pair)) - (np.cumsum(counts) - counts)[pair]
  sizes, shifts = _find_messages(counts.reshape(num_devices, num_devices))

  # A row has the same index within a message when it is sent and when it is
  # received. If each pair of devices has its own message, sent messages are
  # sorted by receiver, and received messages by sender.
  starts = np.cumsum([0, *sizes])
  if shifts is None:
    sent_at = starts[reader] + number
    received_at = starts[holder] + number
  else:
    message = np.searchsorted(shifts, (reader - holder) % num_devices)
    sent_at = received_at = starts[message] + number

  # A message has the same length on all devices, so shorter ones are padded
  # with rows that do not exist. Received rows come after the device's own rows.
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
  """Chooses between a message to every device and messages to a few.

  Args:
    counts: int [to, from], the number of positions that each device reads from
      each other device.

  Returns:
    (sizes, shifts), as in `Route`.
  """
  # With messages by shift, few are needed if the pattern is local, because each
  # device then reads only from the devices just before it.
  num_devices = len(counts)
  device = np.arange(num_devices)
  longest = []
  for shift in range(num_devices):
    read = counts[device, device - shift]
    longest.append(int(read.max()))
  shifts = tuple(np.flatnonzero(longest).tolist())

  # Messages to every device, all as long as the longest, are a single
  # operation.
  most = int(counts.max())
  is_longer = (sum(longest), len(shifts)) > ((num_devices - 1) * most, 1)
  if is_longer or len(shifts) > MAX_SHIFTS:
    return (most,) * num_devices, None
  return tuple(longest[shift] for shift in shifts), shifts


def of_device(table: np.ndarray, axes: Axes) -> Table:
  """Returns the device's row of a table [devices, ...].

  The result is a constant if all rows are equal.
  """
  if (table == table[:1]).all():
    return table[0]
  return jnp.asarray(table)[lax.axis_index(axes)]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange(Arrangement):
  """An order of positions that are stored on several devices.

  `restore` is the transpose of `arrange`: it adds the result of each row to the
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
    """Adds results on the devices that store their positions."""
    # First undo `read`, which sorts the results as stored rows, then received
    # rows. Then return the results of received rows to their devices.
    route = self.route
    inverse = _inverse(route.read, route.own + route.sent.shape[1])
    place = of_device(inverse, self.axes)

    def restore_array(x):
      held = _take(x, place)
      total = held[:, : route.own]
      if not route.sizes:
        return total

      came = self._send(held[:, route.own :], step=-1)
      # Messages are added one after another. A row that several devices have
      # read is then added in the same order each time, and never twice in one
      # operation.
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
    """Sends messages or, if `step` is -1, returns their results to senders."""
    route = self.route
    if route.shifts is None:
      return lax.all_to_all(x_BL, self.axes, 1, 1, tiled=True)

    # Each message is one permutation, in which device d sends to d + shift.
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
  """Returns rows of x; 0 if `at` is out of range or -1."""
  # A constant index of all rows in order needs no copy.
  n = x_BL.shape[1]
  if isinstance(at, np.ndarray) and np.array_equal(at, range(n)):
    return x_BL
  at = jnp.where(at < 0, n, at)
  return jnp.take(x_BL, at, axis=1, mode="fill", fill_value=0)


def _inverse(read, num_held):
  """Inverts `read`: returns the place that reads each row, -1 for none."""
  devices, places = np.nonzero(read >= 0)
  inverse = np.full((len(read), num_held), -1, np.int32)
  inverse[devices, read[devices, places]] = places
  return inverse


@dataclasses.dataclass(frozen=True, eq=False)
class OverHeads(Arrangement):
  """An order in which each device has all positions of some of the heads."""

  axes: Axes
  order: Arrangement  # the order of positions on one device

  @property
  def positions(self) -> Table:
    return self.order.positions

  def arrange(self, arrays: Any) -> Any:
    return self.order.arrange(to_heads(self.axes, arrays))

  def restore(self, arrays: Any) -> Any:
    return to_positions(self.axes, self.order.restore(arrays))


def to_heads(axes: Axes, arrays: Any) -> Any:
  """Exchanges some positions of all heads for all positions of some heads.

  Args:
    axes: the axes of the mesh that split positions.
    arrays: a pytree of arrays [B, own, H, ...]. An array with a single head,
      such as segments, is gathered on all devices.

  Returns:
    Arrays [B, L, H / S, ...]. Device i gets the i-th of S equal shares of the
    heads.
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
  """A part that is divided over devices, into slices of its query order."""

  queries: Route
  keys: Route
  layouts: tuple[Layout, ...]  # the tiles of each device, in its own orders

  @property
  def received(self) -> int:
    return self.queries.received + self.keys.received


@functools.lru_cache(maxsize=128)
def slice_part(part: Pattern, n: int, tile: int, num_devices: int) -> Slices:
  """Divides the tiles of a part over devices, in equal slices of queries.

  Each device computes the tiles of its own queries, so that nothing is summed
  over devices in the forward pass.

  Args:
    part: the part of a pattern.
    n: positions of a sequence, a multiple of the number of devices.
    tile: positions on a side of a tile.
    num_devices: number of devices, S.
  """
  layout = part.layout(n, tile)
  own = n // num_devices
  num_rows = -(-n // (tile * num_devices))  # query tiles of a device
  device, rows = np.divmod(layout.rows, num_rows)

  # Find the queries that each device computes, and the keys that these need.
  dealt = np.arange(num_devices * num_rows)
  query_positions = _positions(layout.query_order, dealt, tile)
  queries = find_route(query_positions.reshape(num_devices, -1), own)
  key_positions, cols = _keys(part, layout, device, num_devices, own)
  keys = find_route(key_positions, own)

  # Make a layout of each device, whose tiles are sorted by row.
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
  """Returns the positions in tiles of an order, [tiles, tile].

  Places beyond the end of the order are -1.
  """
  ranks = tiles[:, None] * tile + np.arange(tile)
  n = len(order)
  return np.where(ranks < n, order[ranks.clip(max=n - 1)], -1)


def _keys(part, layout, device, num_devices, own):
  """Finds the keys that each device needs.

  Args:
    part: the part of a pattern.
    layout: the tiles of the part.
    device: int [tiles], index of the device that computes each tile.
    num_devices: number of devices, S.
    own: number of positions that each device stores.

  Returns:
    (positions, columns). `positions`, int [S, places], contains the position of
    the key at each place of each device, or -1 for keys that no query needs.
    `columns`, int [tiles], contains the column of each tile in its device's
    order of keys.
  """
  tile = layout.tile
  num_cols = -(-len(layout.key_order) // tile)

  # Find the distinct columns of each device, and the column of each tile among
  # them.
  columns, column_of_tile = np.unique(
    device * num_cols + layout.cols, return_inverse=True
  )
  owner, col = np.divmod(columns, num_cols)
  positions = _positions(layout.key_order, col, tile)

  # If all positions of a column are stored on its device, all its keys are
  # kept, because none need to be sent. Of any other column, only keys that are
  # in some pair are sent: a strided pattern may need a single key of a tile. A
  # full tile needs all keys.
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

  # Number the columns of each device consecutively.
  starts = np.searchsorted(owner, np.arange(num_devices + 1))
  place = np.arange(len(columns)) - starts[owner]
  most_columns = max(1, np.diff(starts).max())
  places = np.full((num_devices, most_columns, tile), -1)
  places[owner, place] = np.where(is_needed, positions, -1)
  return places.reshape(num_devices, -1), place[column_of_tile]


def plan_device(
  backend: contract.Backend, request: contract.Request
) -> contract.Plans:
  """Returns the plans of a device if positions are split over devices.

  By default, a part is split into slices of positions. It is split by head
  instead if slices would send a device more positions than it stores, and if
  the KV heads can be split evenly.
  """
  axes = request.split.over_positions
  num_devices = lax.axis_size(axes)
  own = request.length // num_devices
  plans: list[tuple[contract.Plan, contract.Heads]] = []
  for part, heads in heads_lib.heads_of_parts(request.patterns, request.length):
    of_part = heads_lib.request_of(request, part, heads)
    tile = _divisor_tile(backend, part, of_part, own)
    slices = slice_part(part, request.length, tile, num_devices)

    # If slices would exchange many keys, exchange all positions of some heads
    # instead.
    can_split_heads = of_part.num_key_heads % num_devices == 0
    if slices.received > own and can_split_heads:
      for plan in _plan_heads(backend, part, of_part):
        plans.append((plan, heads))
      continue

    # Backends are frozen dataclasses, and therefore hashable, but the type of
    # the protocol does not say so.
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
  """Returns a tile size that divides a device's number of positions.

  If that size would be too small, returns the tile size of the backend.
  """
  # Tiles that divide a device's positions need no padding.
  tile = backend.tile_size(part, request)
  divisor = math.gcd(tile, own)
  return divisor if divisor >= min(tile, backend.smallest_tile) else tile


def _plan_heads(backend, part, request):
  """Yields plans of a part for a device's share of heads, at all positions."""
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
  """Stacks the tables of all devices: arrays [S, ...].

  The result is cached, because several layers and both passes need the same
  tables.
  """
  tables = backend.device_tables(part, slices.layouts, request)
  return jax.tree.map(lambda *x: np.stack(x), *tables)


def own_heads(
  request: contract.Request, arrays: Any
) -> tuple[contract.Request, Any]:
  """Returns the request and the arrays of a device's heads, at all positions.

  All devices run the same program, so their heads must have equal patterns.

  Args:
    request: the request for all heads.
    arrays: a pytree of arrays [heads, ...], or [1, ...] if all heads share one.
      In arrays with 4 axes, the axis of sequences comes first.

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
      f" {num_devices} devices so that all devices get the same patterns and"
      f" equally many of the {num_key_heads} KV heads; split positions over"
      " fewer devices"
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
    # `to_heads` copies a single KV head to all devices.
    num_key_heads=max(1, num_key_heads // num_devices),
    split=contract.Split(),
  )
  return own_request, jax.tree.map(take, arrays)
