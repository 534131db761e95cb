"""Brings positions to the devices that need them, and results back.

Within `jax.shard_map`. Both classes are orders of positions, as is
`contract.Order` on one device: queries, keys and values are arranged for an
executor, and its results restored.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import side_by_side
from sparse_transformer.attention.contract import Arrangement, Table
from sparse_transformer.attention.moves import Moves

Axes = tuple[str, ...]  # of a mesh


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
    moves: what devices send each other.
    table: int32 [devices, places], the position at each place of a device, -1
      for none.
    read: int32 [devices, places], where it is in `moves.held`, -1 for none;
      None if places are those of `moves.held`, and padding.
  """

  axes: Axes
  moves: Moves
  table: np.ndarray
  read: np.ndarray | None

  @property
  def positions(self) -> Table:
    """The position at each place of this device."""
    return of_device(self.table, self.axes)

  def arrange(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [B, own, ...] in this order; padded places hold finite values."""
    came = []
    for message in self.moves.messages:
      at = of_device(message.sent, self.axes)

      def send(x_BL, pairs=message.pairs):
        return self._send(x_BL, pairs)

      found = _as_one(send, [_take(x, at) for x in arrays])
      came.append([_pad(x, message.before, 0) for x in found])
    pieces = [arrays, *came] if self.moves.keeps_own else came
    held = [
      xs[0] if len(xs) == 1 else jnp.concatenate(xs, 1)
      for xs in zip(*pieces, strict=True)
    ]
    if self.read is None:
      missing = self.table.shape[1] - self.moves.held.shape[1]
      return tuple(_pad(x, 0, missing) for x in held)
    read = of_device(self.read, self.axes)
    return tuple(_take(x, read) for x in held)

  def restore(self, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The transpose of `arrange`: where positions are held, they are added."""
    num_held = self.moves.held.shape[1]
    if self.read is None:
      held = [x[:, :num_held] for x in arrays]
    else:
      at = of_device(_inverse(self.read, num_held), self.axes)
      held = [
        jnp.take(x, at, axis=1, mode="fill", fill_value=0) for x in arrays
      ]
    own, first = self.moves.own, 0
    if self.moves.keeps_own:
      totals, first = [x[:, :own] for x in held], own
    else:
      totals = [
        jnp.zeros_like(x, shape=(len(x), own, *x.shape[2:])) for x in held
      ]
    for message in self.moves.messages:
      first += message.before
      size = message.sent.shape[1] * self._copies
      came = [x[:, first : first + size] for x in held]
      first += size

      def send_back(x_BL, pairs=message.pairs):
        return self._send_back(x_BL, pairs)

      at = of_device(message.sent, self.axes)
      totals = [
        _add(total, at, x)
        for total, x in zip(totals, _as_one(send_back, came), strict=True)
      ]
    return tuple(totals)

  @property
  def _copies(self):
    """Messages of the size of what is sent that a device gets at once."""
    return len(self.table) if self.moves.kind == "all-gather" else 1

  def _send(self, x_BL, pairs):
    if self.moves.kind == "all-gather":
      return lax.all_gather(x_BL, self.axes, axis=1, tiled=True)
    if self.moves.kind == "all-to-all":
      return lax.all_to_all(x_BL, self.axes, 1, 1, tiled=True)
    return lax.ppermute(x_BL, self.axes, pairs)

  def _send_back(self, x_BL, pairs):
    if self.moves.kind == "all-gather":
      return lax.psum_scatter(x_BL, self.axes, scatter_dimension=1, tiled=True)
    return self._send(x_BL, [pair[::-1] for pair in pairs])


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


def _take(x_BL, at):
  """Rows of x; some row where there is none."""
  if _is_all_of(x_BL, at):
    return x_BL
  return jnp.take(x_BL, at.clip(0, x_BL.shape[1] - 1), axis=1)


def _add(x_BL, at, new_BP):
  """x with rows added, each to another one; none where it is out of range."""
  if _is_all_of(x_BL, at):
    return x_BL + new_BP
  return x_BL.at[:, at].add(new_BP, mode="drop", unique_indices=True)


def _is_all_of(x_BL, at):
  is_constant = isinstance(at, np.ndarray)
  return is_constant and np.array_equal(at, np.arange(x_BL.shape[1]))


def _pad(x_BL, before, after):
  if not before + after:
    return x_BL
  return jnp.pad(x_BL, [(0, 0), (before, after), *[(0, 0)] * (x_BL.ndim - 2)])


def _inverse(read, num_held):
  """Where each place of what is held is read, out of range for nowhere."""
  devices, places = np.nonzero(read >= 0)
  inverse = np.full((len(read), num_held), read.shape[1], np.int32)
  inverse[devices, read[devices, places]] = places
  return inverse
