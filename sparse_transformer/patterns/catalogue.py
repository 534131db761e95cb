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
    # This is true for all positions, and has the broadcast shape of q and k.
    return (q >= 0) & (k >= 0)


@register
@dataclasses.dataclass(frozen=True)
class Local(Checked):
  """The last `window` keys, including the query itself.

  With `causal=False`, the window consists of the query itself and the `window
  // 2` keys on either side, as in Longformer's library. Source: Child et al.
  2019, section 4.3. Their formula includes `window + 1` keys; their released
  code includes exactly `window`, as this class does.
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
  """`window` keys that are `dilation` apart, including the query itself.

  With `causal=False`, there are `window // 2` keys on either side of the query.
  Source: Beltagy et al. 2020, arXiv 2004.05150.
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
    # When positions are sorted by residue, the keys of a window are adjacent.
    return _by_residue(n, self.dilation)


@register
@dataclasses.dataclass(frozen=True)
class Strided(Checked):
  """The query's column: every `stride`-th key, counted back from the query.

  With an offset, counting starts `offset` positions after the query, so the
  query does not see itself. Offset 1 selects the column of the
  target: the keys whose inputs are the bytes `stride`, 2 `stride`, ... before
  the target. Source: Child et al. 2019, section 4.3, with offset 0.
  """

  stride: int
  offset: int = 0
  causal: bool = True

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.offset >= self.stride:
      raise ValueError(f"{self}: offset must be less than stride")

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # If there is no offset, the mask does not need the addition.
    ahead = q + self.offset if self.offset else q
    same = ahead % self.stride == k % self.stride
    return (k <= q) & same if self.causal else same

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Positions are sorted by column, so that each column becomes a dense causal
    # block.
    return _by_residue(n, self.stride, self.offset)


@register
@dataclasses.dataclass(frozen=True)
class Block(Checked):
  """The keys of the query's own block of `size` positions, up to the query.

  The query also sees all keys of the `previous` blocks before its own. With
  `causal=False`, it sees all keys of its own block, and of `previous` blocks
  before and after it. Source: Child et al. 2019, section 4.3, A^(1) of fixed
  attention.
  """

  size: int
  previous: int = 0
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    # The number of blocks from the key's block to the query's block.
    distance = q // self.size - k // self.size
    if self.causal:
      return (k <= q) & (distance <= self.previous)

    return _within(distance, self.previous)


@register
@dataclasses.dataclass(frozen=True)
class Summary(Checked):
  """The summary columns of all blocks of `size` positions, up to the query.

  The summary columns of a block are a group of `width` positions. Groups are
  counted from the end of the block, so that `shift=0` selects the last `width`
  positions. Different heads may use different groups. With `causal=False`,
  every query sees the summary columns of all blocks. Source: Child et al. 2019,
  section 4.3, A^(2) of fixed attention.
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
    # `q >= 0` is always true. It gives the mask the broadcast shape of q and k.
    return (k <= q) & is_summary if self.causal else (q >= 0) & is_summary

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Summary columns are sorted first, then the keys that no query reads. Among
    # the latter, keys before the summary columns are separated from keys after
    # them, so that bounds on k % size can exclude both.
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
    # The parts define the mask. They are disjoint, and their distances are at
    # most 2**29.
    masks = (part.mask(q, k) for part in self.parts())
    return functools.reduce(operator.or_, masks)

  def parts(self) -> tuple[Pattern, ...]:
    # Distances end at 2**29, so that all values fit in 32 bits.
    groups = range(0, 30, _PowerGaps.COUNT)
    distances = (_PowerGaps(2**i, self.window) for i in groups)
    return Local(self.window), *distances


@dataclasses.dataclass(frozen=True)
class _PowerGaps(Pattern):
  """The keys at distances `first`, 2 `first`, 4 `first`, ... before the query.

  Distances below `window` are omitted, because the local window already
  contains them and parts must be disjoint.
  """

  first: int
  window: int

  # The number of distances in one part. In the part's orders, a key is then at
  # most 32 places from its query, so a tile of 64 queries needs only two tiles
  # of keys.
  COUNT = 6

  def mask(self, q: Integers, k: Integers) -> Booleans:
    distances = [self.first << i for i in range(self.COUNT)]
    masks = [q - k == d for d in distances if d >= self.window]

    # Equal residues follow from the distances, but interval arithmetic cannot
    # derive them.
    same = q % self.first == k % self.first
    # No position is negative, so the union starts empty. It stays empty if all
    # distances are omitted.
    return same & functools.reduce(operator.or_, masks, (q < 0) & (k < 0))

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    return _by_residue(n, self.first)


@register
@dataclasses.dataclass(frozen=True)
class Global(Checked):
  """The first `size` positions.

  With `causal=False`, these positions, as queries, also attend to every key.
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

  Blocks are drawn from block `first` up to the block that is `last` blocks
  before the query's own. With `causal=False`, two blocks attend to each other
  if the later one drew the earlier one.
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
    # One block is drawn from each of `num` strata, so that draws are distinct
    # without being compared. Nothing is drawn from an empty stratum.
    count = row - (self.last + self.first - 1)

    # No block is negative, so the union of the draws starts empty.
    hits = (row < 0) & (col < 0)
    for draw in range(self.num):
      begin = count * draw // self.num
      end = count * (draw + 1) // self.num
      size = end - begin

      # The draw is computed from the block and the seed, not looked up in a
      # table, so that interval arithmetic can evaluate it.
      chance = _hash(row, self.seed * self.num + draw)
      drawn = begin + _share(chance, size)
      is_drawn = col == drawn + self.first
      hits = hits | (is_drawn & (size > 0))

    # The first rows have no blocks to draw from.
    return hits & (count > 0)


# Each draw adds about 40 operations to the mask, and all of them run in every
# tile.
MAX_DRAWS = 32
_LEVELS = 2**14  # number of hash values
_PRIME = 46337  # the largest p < 2**15.5 with p % 3 == 2: cubes are distinct


def _hash(x: Integers, seed: int) -> Integers:
  """Hashes integers to pseudo-random ones in [0, _LEVELS).

  The hash uses only operators that a mask may use, and its products stay below
  2**31.
  """
  a = 7919 + seed * 104729 % 16381
  b = seed * 15485863 % _PRIME

  # An affine map alone is too regular. Cubing permutes the residues and
  # scatters them.
  x = (x % _PRIME * a + b) % _PRIME
  for shift in 12345, 23456:
    x = (x * x % _PRIME * x + shift) % _PRIME

  return x * _LEVELS // _PRIME


def _share(chance: Integers, size: Integers) -> Integers:
  """Computes about `size * chance / _LEVELS`, rounded down.

  The size is split into high and low bits, so that products stay below 2**31.
  """
  high = chance * (size // 128) // (_LEVELS // 128)
  return high + chance * (size % 128) // _LEVELS


class _Shorthand(Checked):
  """A named pattern that is defined by other patterns.

  The pattern contains the same pairs as its definition, but is a single part in
  natural order.
  """

  def __post_init__(self) -> None:
    super().__post_init__()
    # This checks the fields, because the patterns in the definition check
    # theirs.
    self.definition()

  def definition(self) -> Pattern:
    """Returns the combination of patterns that the name stands for."""
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

  A block has `block` positions. A query attends to `window` blocks centered on
  its own block, to the first `num_global` blocks, and to `num_random` other
  past blocks. `window` must be odd. With `causal=True`, the query does not
  attend to the later blocks of the window. Source: Zaheer et al. 2020, arXiv
  2007.14062. In the paper, the last block is also global, and random blocks are
  drawn from both sides of the query.
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

    # Random blocks are drawn between the first blocks and the window, so that
    # no draw selects a block that the query already sees.
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
  """The bytes up to the query in its image row, and the `previous` rows above.

  With `causal=False`, the query sees all bytes of its row and of the `previous`
  rows above and below it.
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
  """The bytes up to the query in its column of pixels, in all channels.

  With `causal=False`, the pattern contains all bytes of the column.
  """

  columns: int
  channels: int = 3
  causal: bool = True

  def mask(self, q: Integers, k: Integers) -> Booleans:
    same = self._column(q) == self._column(k)
    return (k <= q) & same if self.causal else same

  def orders(self, n: int) -> tuple[np.ndarray, np.ndarray]:
    # Positions are sorted by column, and from top to bottom within a column.
    order = np.argsort(self._column(np.arange(n)), kind="stable")
    return order, order


@register
@dataclasses.dataclass(frozen=True)
class Neighborhood(_Raster):
  """The pixels around the query's own pixel, in all channels.

  The neighborhood includes the query's row up to the query, the `height - 1`
  rows above it, and `width // 2` columns on either side. With `causal=False`,
  it includes the query's row and `height // 2` rows above and below it.
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
    # Positions are sorted by patches of 4 x 4 pixels, which are 48 bytes in
    # color. For neighborhoods of 3 x 3 to 16 x 32 pixels, tiles are then up to
    # twice as full as in raster order.
    i = np.arange(n)
    order = np.lexsort((i, self._column(i) // 4, self._row(i) // 4))
    return order, order


def _within(distance: Integers, reach: int) -> Booleans:
  """Returns whether a distance is at most `reach`, on either side."""
  return (distance <= reach) & (-reach <= distance)


def _by_residue(n, period, offset=0):
  """Sorts queries by (q + offset) % period, and keys by k % period.

  Positions with the same residue stay in their natural order.
  """
  i = np.arange(n)
  query_order = np.argsort((i + offset) % period, kind="stable")
  key_order = np.argsort(i % period, kind="stable")
  return query_order, key_order


# Type checkers understand only a literal `__all__`. Without one, they see all
# public names.
if not TYPE_CHECKING:
  __all__ = list(CATALOGUE)
