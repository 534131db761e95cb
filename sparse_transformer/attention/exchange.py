"""Brings positions to the devices that need them, and results back.

A sequence is split over S devices in order, each of which holds `own`
positions. A `Route` is known before a program is traced, as NumPy arrays.
`Exchange` and `OverHeads` are orders of positions, as `orders.Order` is on one
device, and run within `jax.shard_map`. Their `axes` are the mesh axes that
positions are split over.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.orders import Arrangement, apply_at_once

MAX_ROUNDS = 8  # permutations, one after another
MAX_SLICES = 4  # joined instead of gathering their rows


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
  """How devices get the positions that they need: in a few messages each."""

  # int32 [S, places], the position at each place of a device, -1 for none.
  positions: np.ndarray
  own: int  # positions that each device holds
  # The number of positions in each message, the same on all devices.
  sizes: tuple[int, ...]
  # The pairs (from, to) of each message, a permutation; None if the i-th
  # message of a device goes to device i.
  ways: tuple[tuple[tuple[int, int], ...], ...] | None
  # int32 [S, sent], which places of its part a device sends; numbers from
  # `own` on send nothing.
  sent: np.ndarray
  # int32 [S, places], where each place is among what a device has, its own
  # positions followed by those that it received; -1 for none.
  read: np.ndarray

  @property
  def kind(self) -> str:
    """The collective: "none", "permute" or "all-to-all"."""
    if not self.sizes:
      return "none"
    return "all-to-all" if self.ways is None else "permute"

  @property
  def received(self) -> int:
    """Positions that a device receives from others."""
    return sum(self.sizes if self.ways is not None else self.sizes[1:])


def find_route(positions: np.ndarray, own: int) -> Route:
  """The `Route` by which a device receives the fewest positions.

  The arguments are those of a `Route`; no position occurs twice on a device.
  """
  num_devices = len(positions)
  read = np.where(positions < 0, -1, positions % own).astype(np.int32)
  holders = np.where(positions < 0, -1, positions // own)
  is_away = holders != np.arange(num_devices)[:, None]
  device, place = np.nonzero((holders >= 0) & is_away)
  holder = holders[device, place]
  counts = np.zeros((num_devices, num_devices), int)
  np.add.at(counts, (holder, device), 1)
  sizes, ways = _find_messages(counts)
  starts = np.cumsum([0, *sizes])
  sent_at = received_at = _number(holder, device)
  if ways is None:
    sent_at, received_at = sent_at + starts[device], sent_at + starts[holder]
  else:
    start = np.zeros_like(counts)
    for first, pairs in zip(starts, ways, strict=False):
      start[tuple(np.transpose(pairs))] = first
    sent_at = received_at = sent_at + start[holder, device]
  sent = np.tile(own + np.arange(starts[-1], dtype=np.int32), (num_devices, 1))
  sent[holder, sent_at] = read[device, place]
  read[device, place] = own + received_at
  return Route(positions.astype(np.int32), own, sizes, ways, sent, read)


def _find_messages(counts):
  """(sizes, ways) of messages that move counts[from, to] positions."""
  num_devices, is_sent = len(counts), counts > 0
  size = int(counts.max())
  to_all = (size,) * num_devices, None
  if max(is_sent.sum(0).max(), is_sent.sum(1).max()) > MAX_ROUNDS:
    return to_all
  # The largest first: a message is as long as the longest of its permutation.
  rounds: list[dict[int, int]] = []  # {from: to}
  for source, target in sorted(
    np.argwhere(is_sent).tolist(),
    key=lambda pair: (-counts[*pair], (pair[1] - pair[0]) % num_devices),
  ):
    free = (x for x in rounds if source not in x and target not in x.values())
    chosen = next(free, None)
    if chosen is None:
      rounds.append(chosen := {})
    chosen[source] = target
  sizes = tuple(int(max(counts[pair] for pair in x.items())) for x in rounds)
  is_worse = (sum(sizes), len(rounds)) > ((num_devices - 1) * size, 1)
  if is_worse or len(rounds) > MAX_ROUNDS:
    return to_all
  return sizes, tuple(tuple(sorted(x.items())) for x in rounds)


def _number(holder, device):
  """The number of each entry among those of the same holder and device."""
  group = holder * (device.max(initial=0) + 1) + device
  order = np.argsort(group, kind="stable")
  ordered, number = group[order], np.empty(len(group), int)
  number[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
  return number


def _alike(read):
  """One table for all devices, if theirs differ only in missing places.

  Then it is a constant, and may be slices.
  """
  common = read.max(0)
  places = common[common >= 0]
  is_alike = ((read < 0) | (read == common)).all()
  is_alike &= len(np.unique(places)) == len(places)
  return np.broadcast_to(common, read.shape) if is_alike else read


def of_device(table: np.ndarray, axes: contract.Axes) -> contract.Table:
  """A device's row of a table [devices, ...]; a constant if all are equal."""
  if (table == table[:1]).all():
    return table[0]
  return jnp.asarray(table)[lax.axis_index(axes)]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange(Arrangement):
  """An order of positions, each of which some device holds."""

  axes: contract.Axes
  route: Route

  @property
  def positions(self) -> contract.Table:
    return of_device(self.route.positions, self.axes)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    if self.route.sizes:
      at = of_device(self.route.sent, self.axes)
      came = apply_at_once(self._send, [_take(x, at) for x in arrays])
      arrays = tuple(map(_join, arrays, came))
    # What is at a missing place is masked, so that any rows may be there.
    read = of_device(_alike(self.route.read), self.axes)
    return tuple(_take(x, read) for x in arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Adds results where positions are held; missing places have none."""
    route, own = self.route, self.route.own
    at = of_device(_inverse(route.read, own + route.sent.shape[1]), self.axes)
    held = [_take(x, at) for x in arrays]
    totals = [x[:, :own] for x in held]
    if not route.sizes:
      return tuple(totals)
    send_back = functools.partial(self._send, is_back=True)
    came = apply_at_once(send_back, [x[:, own:] for x in held])
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

  def _send(self, x_BL, is_back=False):
    """Sends messages or, back, what was added to them."""
    if self.route.ways is None:
      return lax.all_to_all(x_BL, self.axes, 1, 1, tiled=True)
    pieces = jnp.split(x_BL, np.cumsum(self.route.sizes)[:-1], axis=1)
    step = -1 if is_back else 1
    came = (
      lax.ppermute(piece, self.axes, [pair[::step] for pair in pairs])
      for piece, pairs in zip(pieces, self.route.ways, strict=True)
    )
    return _join(*came)


@dataclasses.dataclass(frozen=True, eq=False)
class OverHeads(Arrangement):
  """An order of all positions: each device gets them for its share of heads."""

  axes: contract.Axes
  order: Any  # an `Arrangement` on one device

  @property
  def positions(self) -> contract.Table:
    return self.order.positions

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, n, heads of a device, ...], from [B, own, H, ...]."""
    return self.order.arrange(*to_heads(self.axes, *arrays))

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return to_positions(self.axes, *self.order.restore(*arrays))


def to_heads(axes: contract.Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """All positions of a device's heads, from its positions of all heads.

  A single head, such as that of segments, is for all devices.
  """

  def of_array(x_BLH):
    if x_BLH.shape[2] == 1:
      return lax.all_gather(x_BLH, axes, axis=1, tiled=True)
    return lax.all_to_all(x_BLH, axes, 2, 1, tiled=True)

  return apply_at_once(of_array, arrays)


def to_positions(
  axes: contract.Axes, *arrays: jax.Array
) -> tuple[jax.Array, ...]:
  """Undoes `to_heads`."""
  return apply_at_once(
    lambda x: lax.all_to_all(x, axes, 1, 2, tiled=True), arrays
  )


def _join(*pieces):
  return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, 1)


def _take(x_BL, at):
  """Rows of x, 0 where `at` is out of range or -1."""
  size = x_BL.shape[1]
  if isinstance(at, np.ndarray):
    at = np.where((at < 0) | (at >= size), size, at)
    run = np.where(at == size, size, at - np.arange(len(at)))
    ends = np.flatnonzero(np.diff(run)) + 1
    if len(ends) < MAX_SLICES:
      return _join(*(_slice(x_BL, x) for x in np.split(at, ends)))
  at = jnp.where(at < 0, size, at)
  return jnp.take(x_BL, at, axis=1, mode="fill", fill_value=0)


def _slice(x_BL, at):
  """Consecutive rows of x, or as many zeros."""
  if at[0] < x_BL.shape[1]:
    return x_BL[:, at[0] : at[-1] + 1]
  return jnp.zeros_like(x_BL, shape=(len(x_BL), len(at), *x_BL.shape[2:]))


def _inverse(read, num_held):
  """Where each place of what is held is read, -1 for nowhere."""
  devices, places = np.nonzero(read >= 0)
  inverse = np.full((len(read), num_held), -1, np.int32)
  inverse[devices, read[devices, places]] = places
  return inverse
