"""Brings positions to the devices that need them, and results back.

A sequence is split over S devices in order, each of which holds `own`
positions. A `Route` is known before a program is traced, as NumPy arrays. Its
`Exchange` runs within `jax.shard_map`. `Exchange` and `OverHeads` are orders
of positions, as `contract.Order` is on one device: queries, keys and values are
arranged for an executor, and its results restored.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import side_by_side
from sparse_transformer.attention.contract import Arrangement, Table

Axes = tuple[str, ...]  # of a mesh
MAX_ROUNDS = 8  # permutations, one after another
MAX_SLICES = 4  # joined instead of gathering their rows


@dataclasses.dataclass(frozen=True, eq=False)
class Route:
  """How devices get the positions that they need.

  Attributes:
    positions: int32 [S, places], the position at each place of a device, -1 for
      none.
    own: positions that each device holds.
    kind: the collective: "none", "permute", "all-to-all" or "all-gather".
    received: positions that a device receives.
    sent: int32 [S, sent], which of its own positions a device sends, numbers
      from `own` on for none.
    rounds: permutations that divide what is sent, each with its number of
      positions and its pairs (from, to).
    read: int32 [S, places], where each place is among what a device has, its
      own positions followed by those that it received; -1 for none.
  """

  positions: np.ndarray
  own: int
  kind: str
  received: int
  sent: np.ndarray
  rounds: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]
  read: np.ndarray


def find_route(positions: np.ndarray, own: int) -> Route:
  """The `Route` by which a device receives the fewest positions.

  Among those with equally many, the one with the fewest collectives.

  Args:
    positions: see `Route`; no position occurs twice on a device.
    own: positions that each device holds.
  """
  num_devices = len(positions)
  device, place = np.nonzero(positions >= 0)
  position = positions[device, place]
  holder = position // own
  read = np.full(positions.shape, -1, np.int32)
  is_own = holder == device
  read[device[is_own], place[is_own]] = position[is_own] % own
  device, place, position, holder = (
    x[~is_own] for x in (device, place, position, holder)
  )
  counts = np.zeros((num_devices, num_devices), int)
  np.add.at(counts, (holder, device), 1)
  shared = np.unique(position)
  most_shared = np.bincount(shared // own, minlength=num_devices).max()
  rounds, others = _rounds(counts), num_devices - 1
  costs = {
    "all-gather": (others * int(most_shared), 1),
    "all-to-all": (others * int(counts.max()), 1),
  }
  if rounds is not None:
    costs["permute"] = sum(size for size, _ in rounds), len(rounds)
  kind = min(costs, key=costs.__getitem__)
  received = costs[kind][0]
  # Where each position is among what its holder sends, and its device receives.
  if kind == "permute":
    start, size = np.zeros_like(counts), 0
    for number_sent, pairs in rounds or ():
      start[tuple(np.transpose(pairs))] = size
      size += number_sent
    sent_at = received_at = start[holder, device] + _number(holder, device)
    num_sent = size
  elif kind == "all-to-all":
    size, number = counts.max(), _number(holder, device)
    sent_at, received_at = device * size + number, holder * size + number
    num_sent = num_devices * size
  else:
    first = np.searchsorted(shared, holder * own)
    sent_at = np.searchsorted(shared, position) - first
    # NumPy integers are no `int` for mypy.
    received_at, num_sent = holder * most_shared + sent_at, most_shared  # type: ignore[assignment]
  sent = np.tile(own + np.arange(num_sent, dtype=np.int32), (num_devices, 1))
  sent[holder, sent_at] = position % own
  read[device, place] = own + received_at
  return Route(
    positions.astype(np.int32),
    own,
    kind if received else "none",
    received,
    sent,
    tuple(rounds or ()) if kind == "permute" else (),
    _alike(read),
  )


def _rounds(counts):
  """Permutations that together move everything: lists of (size, pairs).

  The largest first: a message is as long as the longest of its round. None if
  there would be too many.
  """
  is_sent = counts > 0
  if max(is_sent.sum(0).max(), is_sent.sum(1).max()) > MAX_ROUNDS:
    return None
  num_devices = len(counts)
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
  if len(rounds) > MAX_ROUNDS:
    return None
  return [
    (int(max(counts[pair] for pair in x.items())), tuple(sorted(x.items())))
    for x in rounds
  ]


def _number(holder, device):
  """The number of each entry among those of the same holder and device."""
  group = holder * (device.max(initial=0) + 1) + device
  order = np.argsort(group, kind="stable")
  ordered, number = group[order], np.empty(len(group), int)
  number[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
  return number


def _alike(read):
  """The same for all devices, if they differ only where some have no place.

  Then it is a constant, and may be slices.
  """
  common = read.max(0)
  places = common[common >= 0]
  if len(np.unique(places)) < len(places):
    return read
  is_alike = ((read < 0) | (read == common)).all()
  return np.broadcast_to(common, read.shape) if is_alike else read


def of_device(table: np.ndarray, axes: Axes) -> Table:
  """The row of a device, from a table [devices, ...].

  It is a constant if it is the same for all devices.
  """
  if (table == table[:1]).all():
    return table[0]
  return jnp.asarray(table)[lax.axis_index(axes)]


@dataclasses.dataclass(frozen=True, eq=False)
class Exchange:
  """An order of positions, each of which some device holds.

  Attributes:
    axes: mesh axes that positions are split over.
    route: how devices get them.
  """

  axes: Axes
  route: Route

  @property
  def positions(self) -> Table:
    """The position at each place of this device."""
    return of_device(self.route.positions, self.axes)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, own, ...] in this order; padded places hold finite values."""
    if self.route.received:
      at = of_device(self.route.sent, self.axes)
      came = _as_one(self._send, [_take(x, at) for x in arrays])
      arrays = tuple(map(_join, arrays, came))
    read = of_device(self.route.read, self.axes)
    return tuple(_take(x, read) for x in arrays)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The transpose of `arrange`: where positions are held, they are added."""
    route, own = self.route, self.route.own
    copies = len(route.sent) if route.kind == "all-gather" else 1
    num_held = own + route.sent.shape[1] * copies
    at = of_device(_inverse(route.read, num_held), self.axes)
    held = [_take(x, at) for x in arrays]
    totals = [x[:, :own] for x in held]
    if route.received:
      came = _as_one(self._send_back, [x[:, own:] for x in held])
      first = 0
      # One device after another: a row that several have read is then added in
      # the same order each time, and never twice in one operation.
      for size in self._sizes():
        last = first + size
        at = of_device(route.sent[:, first:last], self.axes)
        totals = [
          x.at[:, at].add(new[:, first:last], mode="drop", unique_indices=True)
          for x, new in zip(totals, came, strict=True)
        ]
        first = last
    return tuple(totals)

  def _sizes(self):
    """How many rows go to each device, in the order in which they are sent."""
    route = self.route
    num_devices, num_sent = route.sent.shape
    if route.kind == "permute":
      return [size for size, _ in route.rounds]
    if route.kind == "all-to-all":
      return [num_sent // num_devices] * num_devices
    return [num_sent]

  def _send(self, x_BL, is_back=False):
    if self.route.kind == "all-to-all":
      return lax.all_to_all(x_BL, self.axes, 1, 1, tiled=True)
    if self.route.kind == "all-gather":
      if is_back:
        return lax.psum_scatter(
          x_BL, self.axes, scatter_dimension=1, tiled=True
        )
      return lax.all_gather(x_BL, self.axes, axis=1, tiled=True)
    came, first = [], 0
    for size, pairs in self.route.rounds:
      ways = [pair[::-1] for pair in pairs] if is_back else pairs
      piece = x_BL[:, first : first + size]
      came.append(lax.ppermute(piece, self.axes, ways))
      first += size
    return _join(*came)

  def _send_back(self, x_BL):
    return self._send(x_BL, is_back=True)


@dataclasses.dataclass(frozen=True, eq=False)
class OverHeads:
  """An order of all positions: each device gets them for its share of heads.

  Attributes:
    axes: mesh axes that positions are split over, and heads meanwhile.
    order: of the positions.
  """

  axes: Axes
  order: Arrangement

  @property
  def positions(self) -> Table:
    """The position at each place."""
    return self.order.positions

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, n, own heads, ...] in this order, from [B, own, H, ...]."""
    return self.order.arrange(*to_heads(self.axes, *arrays))

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Undoes `arrange`."""
    return to_positions(self.axes, *self.order.restore(*arrays))


def to_heads(axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """All positions of a device's heads, from its positions of all heads."""

  def send(x_BLH):
    return lax.all_to_all(x_BLH, axes, 2, 1, tiled=True)

  return tuple(_as_one(send, arrays))


def to_positions(axes: Axes, *arrays: jax.Array) -> tuple[jax.Array, ...]:
  """Undoes `to_heads`."""

  def send(x_BLH):
    return lax.all_to_all(x_BLH, axes, 1, 2, tiled=True)

  return tuple(_as_one(send, arrays))


def _as_one(send: Callable, arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Sends arrays [B, L, H, ...], those of one dtype in one message."""
  rows = [x.reshape(*x.shape[:3], -1) for x in arrays]
  return [
    new.reshape(*new.shape[:3], *x.shape[3:])
    for x, new in zip(arrays, side_by_side.apply(send, rows), strict=True)
  ]


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
  if at[0] == x_BL.shape[1]:
    shape = len(x_BL), len(at), *x_BL.shape[2:]
    return jnp.zeros_like(x_BL, shape=shape)
  return x_BL[:, at[0] : at[-1] + 1]


def _inverse(read, num_held):
  """Where each place of what is held is read, -1 for nowhere."""
  devices, places = np.nonzero(read >= 0)
  inverse = np.full((len(read), num_held), -1, np.int32)
  inverse[devices, read[devices, places]] = places
  return inverse
