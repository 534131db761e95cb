"""The catalogue of patterns: one class each."""

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING

import numpy as np

from sparse_transformer.patterns.base import (
  CATALOGUE,
  Booleans,
  Checked,
  Integers,
  Pattern,
  register,
)


@register
@dataclasses.dataclass(frozen=True)
class Causal(Pattern):
  """Every key up to the query itself."""

  def mask(self, q: Integers, k: Integers) -> Booleans:
    return k <= q


@register
@dataclasses.dataclass(frozen=True)
class Full(Pattern):
  """Every key."""

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # True of all positions, in the shape of both sides.
    return (q >= 0) & (k >= 0)


@register
@dataclasses.dataclass(frozen=True)
class Local(Checked):
  """The last `window` keys, the query itself included.

  Bidirectional: `window // 2` keys to either side, as in Longformer's library.
  Source: Child et al. 2019, section 4.3. Their formula has `window + 1` keys,
  their released code exactly `window`, as here.
  """

  window: int
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    if self.causal:
      return (k <= q) & (q - k < self.window)
    return _within(q - k, self.window // 2)


@register
@dataclasses.dataclass(frozen=True)
class Dilated(Checked):
  """`window` keys `dilation` apart, the query itself included.

  Bidirectional: `window // 2` keys to either side. Source: Beltagy et al. 2020,
  arXiv 2004.05150.
  """

  window: int
  dilation: int
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    same = q % self.dilation == k % self.dilation
    if self.causal:
      return (k <= q) & (q - k < self.window * self.dilation) & same

    return _within(q - k, self.window // 2 * self.dilation) & same

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Sorted by residue, the keys of a window lie side by side.
    return _by_residue(n, self.dilation)


@register
@dataclasses.dataclass(frozen=True)
class Strided(Checked):
  """Every `stride`-th key, counted back from the query: its column.

  With an offset, keys are counted back from `offset` positions after the query,
  and the query does not see itself. Offset 1 gives the column of the target:
  keys that hold the bytes `stride`, 2 `stride`, ... before the target. Source:
  Child et al. 2019, section 4.3, with offset 0.
  """

  stride: int
  offset: int = 0
  causal: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.offset >= self.stride:
      raise ValueError(f"{self}: offset must be less than stride")

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # Without an offset, the mask has no operation for it.
    ahead = q + self.offset if self.offset else q
    same = ahead % self.stride == k % self.stride
    return (k <= q) & same if self.causal else same

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Column by column: each becomes a dense causal block.
    return _by_residue(n, self.stride, self.offset)


@register
@dataclasses.dataclass(frozen=True)
class Block(Checked):
  """The keys so far in the query's own block of `size` positions.

  With `previous`, also the keys of that many blocks before it. Bidirectional:
  all keys of the block, and of `previous` blocks before and after it. Source:
  Child et al. 2019, section 4.3, A^(1) of fixed attention.
  """

  size: int
  previous: int = 0
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # In blocks, from the key's to the query's.
    distance = q // self.size - k // self.size
    if self.causal:
      return (k <= q) & (distance <= self.previous)

    return _within(distance, self.previous)


@register
@dataclasses.dataclass(frozen=True)
class Summary(Checked):
  """The summary columns so far, in every block of `size` positions.

  The summary columns of a block are the `shift`-th group of `width` positions,
  counted from its end: shift 0 is the last `width` positions. Different heads
  may use different groups. Bidirectional: the summary columns of all blocks.
  Source: Child et al. 2019, section 4.3, A^(2) of fixed attention.
  """

  size: int
  width: int
  shift: int = 0
  causal: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if (self.shift + 1) * self.width > self.size:
      raise ValueError(f"{self}: (shift + 1) * width must be at most size")

  def _is_summary(self, k: Integers) -> Booleans:
    # Groups are counted from the end of the block, as in the released code.
    end = self.size - self.shift * self.width
    return (k % self.size >= end - self.width) & (k % self.size < end)

  def mask(self, q: Integers, k: Integers) -> Booleans:
    is_summary = self._is_summary(k)
    # The condition on q, true of all queries, gives the mask both sides' shape.
    return (k <= q) & is_summary if self.causal else (q >= 0) & is_summary

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # The summary columns first, then the keys without a reader. Those before
    # and after the summary are apart, so that bounds on k % size exclude them.
    i = np.arange(n)
    is_after = i % self.size >= self.size - self.shift * self.width
    return i, np.lexsort((is_after, ~self._is_summary(i)))


@register
@dataclasses.dataclass(frozen=True)
class LogSparse(Checked):
  """The last `window` keys, and the keys at distances 1, 2, 4, 8, ...

  Source: Li et al. 2019, arXiv 1907.00235.
  """

  window: int = 1

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # The parts are the definition: disjoint, with gaps of at most 2**29.
    masks = (part.mask(q, k) for part in self.parts())
    return functools.reduce(operator.or_, masks)

  def parts(self) -> tuple[Pattern, ...]:
    # Distances up to 2**29, so that all fit in 32 bits.
    groups = range(0, 30, _PowerGaps.COUNT)
    distances = (_PowerGaps(2**i, self.window) for i in groups)
    return Local(self.window), *distances


@dataclasses.dataclass(frozen=True)
class _PowerGaps(Pattern):
  """The keys at distances `first`, 2 `first`, 4 `first`, ... before the query.

  Distances below `window` are left to the window, so that parts are disjoint.
  """

  first: int
  window: int

  # Distances of one part. In its orders, keys are then at most 32 places from
  # the query: a tile of 64 queries needs two tiles of keys.
  COUNT = 6

  def mask(self, q: Integers, k: Integers) -> Booleans:
    distances = [self.first << i for i in range(self.COUNT)]
    masks = [q - k == d for d in distances if d >= self.window]

    # Equal residues follow from the distances, but bounds can't know that.
    same = q % self.first == k % self.first
    # No position is negative: an empty union, if all distances are left out.
    return same & functools.reduce(operator.or_, masks, (q < 0) & (k < 0))

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _by_residue(n, self.first)


@register
@dataclasses.dataclass(frozen=True)
class Global(Checked):
  """The first `size` positions.

  Bidirectional: as queries, they also attend to every key.
  """

  size: int
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    if self.causal:
      return (k <= q) & (k < self.size)
    return (q < self.size) | (k < self.size)


@register
@dataclasses.dataclass(frozen=True)
class RandomBlocks(Checked):
  """`num` distinct random past blocks for each block of `size` queries.

  Candidates start at block `first` and end `last` blocks before the query's
  block. Bidirectional: two blocks attend to each other if the later one drew
  the earlier one.
  """

  size: int
  num: int
  seed: int = 0
  first: int = 0
  last: int = 1
  causal: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num > MAX_DRAWS:
      raise ValueError(f"{self}: num must be at most {MAX_DRAWS}")

  def mask(self, q: Integers, k: Integers) -> Booleans:
    row = q // self.size
    col = k // self.size

    past = self._draws(row, col)
    return past if self.causal else past | self._draws(col, row)

  def _draws(self, row: Integers, col: Integers) -> Booleans:
    """Returns whether block `row` drew block `col`."""
    # One draw from each of `num` strata, so that draws are distinct without
    # being compared. Empty strata draw none.
    count = row - (self.last + self.first - 1)

    # No block is negative: a start for the union of the draws.
    hits = (row < 0) & (col < 0)
    for draw in range(self.num):
      begin = count * draw // self.num
      end = count * (draw + 1) // self.num
      size = end - begin

      # A function of the block and the seed, not a table: bounds evaluate it.
      chance = _hash(row, self.seed * self.num + draw)
      drawn = begin + _share(chance, size)
      is_drawn = col == drawn + self.first
      hits = hits | (is_drawn & (size > 0))

    # The first rows have no blocks to draw from.
    return hits & (count > 0)


# A mask has about 40 operations for each draw, which all run in every tile.
MAX_DRAWS = 32
_LEVELS = 2**14  # number of hash values
_PRIME = 46337  # the largest p < 2**15.5 with p % 3 == 2: cubes are distinct


def _hash(x: Integers, seed: int) -> Integers:
  """Hashes integers to pseudo-random ones in [0, _LEVELS).

  Only operators of masks are used, and products stay below 2**31.
  """
  a = 7919 + seed * 104729 % 16381
  b = seed * 15485863 % _PRIME

  # An affine map is too regular: cubes, which permute the residues, scatter it.
  x = (x % _PRIME * a + b) % _PRIME
  for shift in 12345, 23456:
    x = (x * x % _PRIME * x + shift) % _PRIME

  return x * _LEVELS // _PRIME


def _share(chance: Integers, size: Integers) -> Integers:
  """Computes about `size * chance / _LEVELS`, rounded down.

  The size is cut in two, so that products stay below 2**31.
  """
  high = chance * (size // 128) // (_LEVELS // 128)
  return high + chance * (size % 128) // _LEVELS


class _Shorthand(Checked):
  """A named pattern that is defined by other patterns.

  Its pairs are those of its definition, but run as one part, in natural order.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    # The patterns in the definition check the fields that they are given.
    self.definition()

  def definition(self) -> Pattern:
    """The combination that the name stands for."""
    raise NotImplementedError

  def mask(self, q: Integers, k: Integers) -> Booleans:
    return self.definition().mask(q, k)


@register
@dataclasses.dataclass(frozen=True)
class Longformer(_Shorthand):
  """A sliding window and the first `num_global` positions.

  Source: Beltagy et al. 2020, arXiv 2004.05150.
  """

  window: int
  num_global: int = 1
  causal: bool = True

  def definition(self) -> Pattern:
    window = Local(self.window, causal=self.causal)
    return window | Global(self.num_global, causal=self.causal)


@register
@dataclasses.dataclass(frozen=True)
class BigBird(_Shorthand):
  """A window of blocks, the first blocks and random blocks.

  A block has `block` positions. A query sees an odd number `window` of blocks
  around its own (if causal, only the first half and its own), the first
  `num_global` blocks, and `num_random` other past blocks. Source: Zaheer et al.
  2020, arXiv 2007.14062, where the last block is also global, and random blocks
  are drawn from both sides.
  """

  block: int = 64
  window: int = 3
  num_global: int = 1
  num_random: int = 3
  seed: int = 0
  causal: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.window % 2 == 0:
      raise ValueError(f"{self}: window must be an odd number of blocks")

  def definition(self) -> Pattern:
    side = self.window // 2  # blocks on each side of the query's own
    window = Block(self.block, side, causal=self.causal)
    first = Global(self.block * self.num_global, causal=self.causal)

    # Random blocks are drawn between the two, so that none is drawn in vain.
    random = RandomBlocks(
      self.block,
      self.num_random,
      self.seed,
      first=self.num_global,
      last=side + 1,
      causal=self.causal,
    )
    return window | first | random


class _Raster(Checked):
  """An image pattern: i = (row * columns + column) * channels + channel."""

  columns: int
  channels: int

  def _row(self, i: Integers) -> Integers:
    return i // (self.channels * self.columns)

  def _column(self, i: Integers) -> Integers:
    return i // self.channels % self.columns


@register
@dataclasses.dataclass(frozen=True)
class Row(_Shorthand):
  """The bytes so far in the query's image row, and the `previous` rows above.

  Bidirectional: all bytes of the row, and of `previous` rows on both sides.
  """

  columns: int
  channels: int = 3
  previous: int = 0
  causal: bool = True

  def definition(self) -> Pattern:
    return Block(self.columns * self.channels, self.previous, self.causal)


@register
@dataclasses.dataclass(frozen=True)
class Column(_Raster):
  """The bytes so far in the query's column of pixels, in all channels.

  Bidirectional: all bytes of the column.
  """

  columns: int
  channels: int = 3
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    same = self._column(q) == self._column(k)
    return (k <= q) & same if self.causal else same

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Column by column, from top to bottom in each.
    order = np.argsort(self._column(np.arange(n)), kind="stable")
    return order, order


@register
@dataclasses.dataclass(frozen=True)
class Neighborhood(_Raster):
  """The pixels around the query's own, in all channels.

  Causal: its row and the `height - 1` rows above, `width // 2` columns to
  either side. Bidirectional: `height // 2` rows to either side.
  """

  height: int
  width: int
  columns: int
  channels: int = 3
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    rows = self._row(q) - self._row(k)
    near = _within(self._column(q) - self._column(k), self.width // 2)
    if self.causal:
      return (k <= q) & (rows < self.height) & near

    return _within(rows, self.height // 2) & near

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Patches of 4 x 4 pixels, 48 bytes in color: tiles are up to twice as full
    # as in raster order, for neighborhoods of 3 x 3 to 16 x 32.
    i = np.arange(n)
    order = np.lexsort((i, self._column(i) // 4, self._row(i) // 4))
    return order, order


def _within(distance: Integers, reach: int) -> Booleans:
  """Returns whether a distance is at most `reach`, on either side."""
  return (distance <= reach) & (-reach <= distance)


def _by_residue(n, period, offset=0):
  """Sorts queries by (q + offset) % period, and keys by k % period.

  Positions of one residue stay in order.
  """
  i = np.arange(n)
  query_order = np.argsort((i + offset) % period, kind="stable")
  key_order = np.argsort(i % period, kind="stable")
  return query_order, key_order


# Type checkers, which understand literals only, take all names.
if not TYPE_CHECKING:
  __all__ = list(CATALOGUE)
