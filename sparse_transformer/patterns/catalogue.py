"""The family of patterns, one class each."""

import dataclasses
import functools
import operator

import numpy as np

from sparse_transformer.patterns.base import (
  Pattern,
  check_not_negative,
  check_positive,
)


@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
  """Every key up to the query itself."""

  def mask(self, q, k):
    return k <= q


@dataclasses.dataclass(frozen=True)
class Full(Pattern):
  """Every pair."""

  def mask(self, q, k):
    return (q >= 0) & (k >= 0)


# The patterns below are causal unless told otherwise.


@dataclasses.dataclass(frozen=True)
class Local(Pattern):
  """The last `window` keys, the query itself included.

  The released code has exactly `window` keys; the paper's formula has one
  more (section 4.3). Bidirectional: `window // 2` to either side, as
  Longformer's library counts (arXiv 2004.05150).
  """

  window: int
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "window")

  def mask(self, q, k):
    if self.causal:
      return (k <= q) & (q - k < self.window)
    return _within(q - k, self.window // 2)


@dataclasses.dataclass(frozen=True)
class Dilated(Pattern):
  """`window` keys, `dilation` apart: q, q - dilation, q - 2 dilation, ...

  Bidirectional: `window // 2` to either side (Longformer, arXiv 2004.05150).
  """

  window: int
  dilation: int
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "window", "dilation")

  def mask(self, q, k):
    same = q % self.dilation == k % self.dilation
    if self.causal:
      return (k <= q) & (q - k < self.window * self.dilation) & same
    return _within(q - k, self.window // 2 * self.dilation) & same

  def orders(self, n):
    return _by_residue(n, self.dilation)


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
  """Every `stride`-th key back from the query itself: its column."""

  stride: int
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "stride")

  def mask(self, q, k):
    same = q % self.stride == k % self.stride
    return (k <= q) & same if self.causal else same

  def orders(self, n):
    return _by_residue(n, self.stride)


@dataclasses.dataclass(frozen=True)
class Block(Pattern):
  """The keys so far in the query's own block of `size` positions.

  previous: how many blocks before it are seen, too. Bidirectional: the whole
  block, and as many after it.
  """

  size: int
  previous: int = 0
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "size")
    check_not_negative(self, "previous")

  def mask(self, q, k):
    distance = q // self.size - k // self.size
    if self.causal:
      return (k <= q) & (distance <= self.previous)
    return _within(distance, self.previous)


@dataclasses.dataclass(frozen=True)
class Summary(Pattern):
  """The summary columns of every block of `size` so far.

  They are the `shift`-th group of `width` positions, counted from the end of
  the block: shift 0 is the last `width` positions (section 4.3, A^(2) of
  fixed attention; distinct groups for distinct heads). Bidirectional: those
  of every block.
  """

  size: int
  width: int
  shift: int = 0
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "size", "width")
    check_not_negative(self, "shift")
    if (self.shift + 1) * self.width > self.size:
      raise ValueError(
        f"{self} does not fit: (shift + 1) * width must be at most size"
      )

  def _is_summary(self, k):
    end = self.size - self.shift * self.width
    return (k % self.size >= end - self.width) & (k % self.size < end)

  def mask(self, q, k):
    is_summary = self._is_summary(k)
    return (k <= q) & is_summary if self.causal else (q >= 0) & is_summary

  def orders(self, n):
    # Summary columns side by side, then the keys nobody reads: those of one
    # side of the summary together, so that bounds tell them from it.
    i = np.arange(n)
    behind = i % self.size >= self.size - self.shift * self.width
    return i, np.lexsort((behind, ~self._is_summary(i)))


@dataclasses.dataclass(frozen=True)
class LogSparse(Pattern):
  """The last `window` keys and those at distances 1, 2, 4, 8, ...

  Li et al. 2019, arXiv 1907.00235.
  """

  window: int = 1

  def __post_init__(self):
    check_positive(self, "window")

  def mask(self, q, k):
    masks = (part.mask(q, k) for part in self.parts())
    return functools.reduce(operator.or_, masks)

  def parts(self):
    # Up to 2**29, so that no distance leaves 32 bits.
    groups = range(0, 30, _PowerGaps.COUNT)
    gaps = tuple(_PowerGaps(2**i, self.window) for i in groups)
    return Local(self.window), *gaps


@dataclasses.dataclass(frozen=True)
class _PowerGaps(Pattern):
  """Distances first, 2 first, 4 first, ...: those of at least `window`.

  COUNT of them, so that among the positions of one residue all lie in two
  tiles of 64.
  """

  first: int
  window: int

  COUNT = 6

  def mask(self, q, k):
    distances = [self.first << i for i in range(self.COUNT)]
    masks = [q - k == d for d in distances if d >= self.window]
    # The residues follow from the distances, but bounds do not see that.
    same = q % self.first == k % self.first
    return same & functools.reduce(operator.or_, masks, (q < 0) & (k < 0))

  def orders(self, n):
    return _by_residue(n, self.first)


@dataclasses.dataclass(frozen=True)
class Global(Pattern):
  """The first `size` positions, which every query sees.

  Bidirectional: they also see every key.
  """

  size: int
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "size")

  def mask(self, q, k):
    if self.causal:
      return (k <= q) & (k < self.size)
    return (q < self.size) | (k < self.size)


@dataclasses.dataclass(frozen=True)
class RandomBlocks(Pattern):
  """`num` distinct random blocks for each block of `size` queries.

  They are drawn from block number `first` on, up to the one `last` before
  the queries' own; all are taken where there are no more than `num`.
  Bidirectional: two blocks see each other if the later one drew the earlier,
  so that a block has `num` before it and on average as many behind it.
  """

  size: int
  num: int
  seed: int = 0
  first: int = 0
  last: int = 1
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "size", "num", "last")
    check_not_negative(self, "seed", "first")

  def mask(self, q, k):
    q, k = q // self.size, k // self.size
    past = self._draws(q, k)
    return past if self.causal else past | self._draws(k, q)

  def _draws(self, row, col):
    """Whether block `row` drew block `col`."""
    # One draw from each of `num` strata of the blocks that may be drawn:
    # distinct without looking at the others. Empty strata draw nothing.
    count = row - (self.last + self.first - 1)
    hits = (row < 0) & (col < 0)
    for draw in range(self.num):
      begin = count * draw // self.num
      size = count * (draw + 1) // self.num - begin
      chance = _hash(row, self.seed * self.num + draw)
      drawn = begin + _share(chance, size)
      hits = hits | ((col == drawn + self.first) & (size > 0))
    return hits & (count > 0)


_LEVELS = 2**14  # of a hash
_PRIME = 46337  # the largest p < 2**15.5 with p % 3 = 2: cubes are distinct


def _hash(x, seed):
  """Pseudo-random integers in [0, _LEVELS)."""
  a, b = 7919 + seed * 104729 % 16381, seed * 15485863 % _PRIME
  x = (x % _PRIME * a + b) % _PRIME
  for shift in (12345, 23456):
    x = (x * x % _PRIME * x + shift) % _PRIME
  return x * _LEVELS // _PRIME


def _share(chance, size):
  """chance / _LEVELS of `size`, rounded down, by products below 2**31."""
  high = chance * (size // 128) // (_LEVELS // 128)
  return high + chance * (size % 128) // _LEVELS


class _Combination(Pattern):
  """A pattern with a name that is defined as a combination of others."""

  def mask(self, q, k):
    return self.definition().mask(q, k)


@dataclasses.dataclass(frozen=True)
class Longformer(_Combination):
  """A sliding window and the first `num_global` positions.

  Beltagy et al. 2020, arXiv 2004.05150.
  """

  window: int
  num_global: int = 1
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "window", "num_global")

  def definition(self):
    window = Local(self.window, causal=self.causal)
    return window | Global(self.num_global, causal=self.causal)


@dataclasses.dataclass(frozen=True)
class BigBird(_Combination):
  """A window of blocks, global blocks and random blocks.

  window: blocks, own and as many to either side; causal: own and those
  before. num_global: first blocks, which all see. num_random: distinct blocks
  of each row of blocks, neither in the window nor global, from the past.

  Zaheer et al. 2020, arXiv 2007.14062, which is bidirectional; there the last
  block is global, too, and exactly `num_random` are drawn from both sides.
  """

  block: int = 64
  window: int = 3
  num_global: int = 1
  num_random: int = 3
  seed: int = 0
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "block", "num_global", "num_random")
    if self.window < 1 or self.window % 2 == 0:
      raise ValueError(f"{self}: window must be an odd number of blocks")
    check_not_negative(self, "seed")

  def definition(self):
    side = self.window // 2
    window = Block(self.block, side, causal=self.causal)
    first = Global(self.block * self.num_global, causal=self.causal)
    random = RandomBlocks(
      self.block,
      self.num_random,
      self.seed,
      first=self.num_global,
      last=side + 1,
      causal=self.causal,
    )
    return window | first | random


# Images in raster order: (row * columns + column) * channels + channel.


@dataclasses.dataclass(frozen=True)
class Row(Pattern):
  """The bytes so far in the query's row of an image.

  previous: how many rows above it are seen, too. Bidirectional: the whole
  row, and as many below it.
  """

  columns: int
  channels: int = 3
  previous: int = 0
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "columns", "channels")
    check_not_negative(self, "previous")

  def mask(self, q, k):
    size = self.columns * self.channels
    return Block(size, self.previous, causal=self.causal).mask(q, k)


@dataclasses.dataclass(frozen=True)
class Column(Pattern):
  """The bytes so far in the query's column of pixels, all channels."""

  columns: int
  channels: int = 3
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "columns", "channels")

  def _column(self, i):
    return i // self.channels % self.columns

  def mask(self, q, k):
    same = self._column(q) == self._column(k)
    return (k <= q) & same if self.causal else same

  def orders(self, n):
    order = np.argsort(self._column(np.arange(n)), kind="stable")
    return order, order


@dataclasses.dataclass(frozen=True)
class Neighborhood(Pattern):
  """The pixels around the query's, all channels.

  Causal: its row and the `height - 1` rows above, `width // 2` columns to
  either side. Bidirectional: `height // 2` rows to either side.
  """

  height: int
  width: int
  columns: int
  channels: int = 3
  causal: bool = True

  def __post_init__(self):
    check_positive(self, "height", "width", "columns", "channels")

  def mask(self, q, k):
    rows = self._row(q) - self._row(k)
    near = _within(self._column(q) - self._column(k), self.width // 2)
    if self.causal:
      return (k <= q) & (rows < self.height) & near
    return _within(rows, self.height // 2) & near

  def orders(self, n):
    # Patches of 4 x 4 pixels, 48 bytes in color: up to twice as full tiles as
    # those of raster order, over neighbourhoods of 3 x 3 to 16 x 32.
    i = np.arange(n)
    order = np.lexsort((i, self._column(i) // 4, self._row(i) // 4))
    return order, order

  def _row(self, i):
    return i // (self.channels * self.columns)

  def _column(self, i):
    return i // self.channels % self.columns


def _within(distance, reach):
  """Whether a distance is at most `reach`, on either side."""
  return (distance <= reach) & (-reach <= distance)


def _by_residue(n, period):
  """Positions by residue: those of one residue side by side."""
  order = np.argsort(np.arange(n) % period, kind="stable")
  return order, order


CATALOGUE = {
  pattern.__name__: pattern
  for pattern in (
    Causal,
    Full,
    Local,
    Dilated,
    Strided,
    Block,
    Summary,
    LogSparse,
    Global,
    RandomBlocks,
    Longformer,
    BigBird,
    Row,
    Column,
    Neighborhood,
  )
}
