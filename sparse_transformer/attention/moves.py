"""Which positions devices send each other, and by which collective.

A sequence is split over devices, in order. Each device needs some positions,
and holds its own. Everything here is known before a program is traced; arrays
are NumPy's. S = devices, P = places.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

MAX_ROUNDS = 8  # messages of a device, after each other


class Needs(NamedTuple):
  """What devices need: one entry for each device and position.

  Attributes:
    device: int [needs], who needs it; ascending.
    rank: int [needs], where it is in some order; ascending for each device.
    position: int [needs].
    own: positions that each device holds.
  """

  device: np.ndarray
  rank: np.ndarray
  position: np.ndarray
  own: int

  @property
  def holder(self) -> np.ndarray:
    """Which device holds each."""
    return self.position // self.own

  def of(self, chosen: np.ndarray) -> "Needs":
    """Some of them."""
    device, rank, position = (x[chosen] for x in self[:3])
    return Needs(device, rank, position, self.own)


def needs_of(
  places: Sequence[np.ndarray], order: np.ndarray, own: int
) -> Needs:
  """The `Needs` of devices for some places, ascending, of an order."""
  device = np.repeat(np.arange(len(places)), [len(x) for x in places])
  rank = np.concatenate(places)
  return Needs(device, rank, order[rank], own)


@dataclasses.dataclass(frozen=True, eq=False)
class Message:
  """One collective.

  Attributes:
    sent: int32 [S, P], which of its own positions a device puts in, numbers
      from `own` on for none.
    pairs: (from, to) of a permutation; () if all devices take part.
    before: places that are left empty before it in what is held.
  """

  sent: np.ndarray
  pairs: tuple[tuple[int, int], ...] = ()
  before: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Moves:
  """How devices get what they need.

  Attributes:
    kind: "none", "permute", "all-to-all" or "all-gather".
    own: positions that each device holds.
    received: positions that a device receives.
    messages: what moves them.
    held: int [S, places], the position at each place of what a device has when
      all has come: its own, if `keeps_own`, and the messages; -1 for none.
    keeps_own: whether `held` begins with the device's own positions.
  """

  kind: str
  own: int
  received: int
  messages: tuple[Message, ...]
  held: np.ndarray
  keeps_own: bool = True


def cheapest(needs: Needs, num_devices: int, tile: int) -> Moves:
  """The `Moves` with which a device receives the fewest positions.

  Of those with equally many, the one with the fewest messages.

  Args:
    needs: what devices need.
    num_devices: how many there are.
    tile: places of a tile. Where possible, what is needed has the same place
      within a tile as in its order, so that sums over tiles keep their order.
  """
  away = needs.of(needs.holder != needs.device)
  if not len(away.device):
    return Moves("none", needs.own, 0, (), _own(needs.own, num_devices))
  counts = np.zeros((num_devices, num_devices), int)
  np.add.at(counts, (away.holder, away.device), 1)
  rounds = _rounds(counts)
  shared = _distinct(away, num_devices)
  num_shared = np.bincount(shared.holder, minlength=num_devices).max()
  others = num_devices - 1
  costs = {
    "all-gather": (others * num_shared, 1),
    "all-to-all": (others * counts.max(), 1),
  }
  if rounds:
    costs["permute"] = sum(counts[r[0]] for r in rounds), len(rounds)
  kind = min(costs, key=costs.__getitem__)
  received = int(costs[kind][0])
  if kind == "permute":
    return _permute(away, counts, rounds, received, tile)
  if kind == "all-to-all":
    return _all_to_all(away, counts, received)
  return _all_gather(needs, shared, received, num_devices)


def _own(own, num_devices):
  return np.arange(own * num_devices, dtype=np.int32).reshape(num_devices, own)


def _distinct(needs, num_devices):
  """What any device needs, by holder and rank."""
  keys = needs.holder * (num_devices * needs.own) + needs.rank
  return needs.of(np.unique(keys, return_index=True)[1])


def _rounds(counts):
  """Permutations that together move everything: lists of (from, to).

  The largest first: a message is as long as the longest of its round. Empty if
  there would be too many.
  """
  is_sent = counts > 0
  if max(is_sent.sum(0).max(), is_sent.sum(1).max()) > MAX_ROUNDS:
    return []
  devices = len(counts)
  pairs = sorted(
    zip(*np.nonzero(is_sent), strict=True),
    key=lambda pair: (-counts[pair], (pair[1] - pair[0]) % devices),
  )
  rounds: list[dict[int, int]] = []  # {from: to}
  targets: list[set[int]] = []
  for source, target in pairs:
    free = (
      i
      for i, pairs_of_round in enumerate(rounds)
      if source not in pairs_of_round and target not in targets[i]
    )
    i = next(free, len(rounds))
    if i == len(rounds):
      rounds.append({})
      targets.append(set())
    rounds[i][source] = target
    targets[i].add(target)
  return [[*r.items()] for r in rounds] if len(rounds) <= MAX_ROUNDS else []


def _within(*keys):
  """The number of each entry among those with the same keys, in their order."""
  order = np.lexsort((np.arange(len(keys[0])), *keys[::-1]))
  sorted_keys = np.stack(keys)[:, order]
  is_new = np.append(True, (np.diff(sorted_keys) != 0).any(0))
  starts = np.flatnonzero(is_new)
  number = np.empty(len(order), int)
  sizes = np.diff(np.append(starts, len(order)))
  number[order] = np.arange(len(order)) - np.repeat(starts, sizes)
  return number


def _nothing(num_devices, own, size):
  """A table of what is sent: numbers out of range, none of them twice."""
  return np.tile(own + np.arange(size, dtype=np.int32), (num_devices, 1))


def _permute(away, counts, rounds, received, tile):
  devices = len(counts)
  round_of = np.full(counts.shape, -1)
  for i, pairs in enumerate(rounds):
    round_of[tuple(np.transpose(pairs))] = i
  rounds_of_needs = round_of[away.holder, away.device]
  number = _within(away.holder, away.device)
  sizes, starts, end = [], [], away.own
  for i, pairs in enumerate(rounds):
    first = away.rank[(rounds_of_needs == i) & (number == 0)].min()
    starts.append(end + (first - end) % tile)
    sizes.append(counts[pairs[0]])
    end = starts[-1] + sizes[-1]
  held = np.full((devices, end), -1, np.int32)
  held[:, : away.own] = _own(away.own, devices)
  at = np.array(starts)[rounds_of_needs] + number
  held[away.device, at] = away.position
  ends = [away.own, *np.add(starts, sizes)]
  messages = []
  for i, pairs in enumerate(rounds):
    sent = _nothing(devices, away.own, sizes[i])
    here = rounds_of_needs == i
    x = away.of(here)
    sent[x.holder, number[here]] = x.position % away.own
    named = tuple((int(source), int(target)) for source, target in pairs)
    messages.append(
      Message(sent, tuple(sorted(named)), int(starts[i] - ends[i]))
    )
  return Moves("permute", away.own, received, tuple(messages), held)


def _all_to_all(away, counts, received):
  devices, size = len(counts), int(counts.max())
  number = _within(away.holder, away.device)
  sent = _nothing(devices, away.own, devices * size)
  sent[away.holder, away.device * size + number] = away.position % away.own
  held = np.full((devices, away.own + devices * size), -1, np.int32)
  held[:, : away.own] = _own(away.own, devices)
  at = away.own + away.holder * size + number
  held[away.device, at] = away.position
  return Moves("all-to-all", away.own, received, (Message(sent),), held)


def _all_gather(needs, shared, received, num_devices):
  """All devices get what any other needs.

  If that includes what devices need of their own, nothing else is needed.
  """
  size = received // (num_devices - 1)
  every = _distinct(needs, num_devices)
  most = np.bincount(every.holder, minlength=num_devices).max()
  keeps_own = bool(most > size)
  sources = shared if keeps_own else every
  holder, position = sources.holder, sources.position
  number = _within(holder)
  sent = _nothing(num_devices, needs.own, size)
  sent[holder, number] = position % needs.own
  came = np.full(num_devices * size, -1, np.int32)
  came[holder * size + number] = position
  held = np.tile(came, (num_devices, 1))
  if keeps_own:
    mine = np.repeat(np.arange(num_devices), size)
    held[mine == np.arange(num_devices)[:, None]] = -1
    held = np.concatenate([_own(needs.own, num_devices), held], axis=1)
  messages = (Message(sent),)
  return Moves("all-gather", needs.own, received, messages, held, keeps_own)
