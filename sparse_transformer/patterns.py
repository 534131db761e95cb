"""Attention patterns: which query attends to which key.

A pattern is a small immutable value: a set of pairs (query, key). Its `mask`
is the definition; reference, fast execution, cost, picture and connectivity
are all derived from it. Patterns know nothing of batch, heads, dtype, device,
tile or sequence length.

The paper's symbols (Child et al. 2019, arXiv 1904.10509): l is `stride`,
`window` or `size`; c is `width`; p is the number of factors; A_i^(m) is row i
of factor m.

>>> pattern = Local(2) | Strided(3)
>>> print(pattern.matrix(6).astype(int))
[[1 0 0 0 0 0]
 [1 1 0 0 0 0]
 [0 1 1 0 0 0]
 [1 0 1 1 0 0]
 [0 1 0 1 1 0]
 [0 0 1 0 1 1]]
>>> pattern.pairs(1024)
176298
"""

import ast
import bisect
import dataclasses
import functools
import itertools
import operator

import numpy as np

from sparse_transformer import bounds


@dataclasses.dataclass(frozen=True)
class Pattern:
  """A set of pairs (query, key), both counted from 0.

  A subclass defines `mask`, and `orders` where its pairs lie scattered in
  natural order.
  """

  def mask(self, q, k):
    """Which pairs are in the set: integer arrays in, booleans out.

    Uses + - * // % < <= == & | ~ only, and divides by positive integers, so
    that NumPy, XLA and the bounds of whole tiles share this one definition.
    All values must fit 32 bits: a product of two positions may not.
    """
    raise NotImplementedError(f"{type(self).__name__} defines no mask")

  def orders(self, n):
    """(query order, key order): orders of positions in which tiles fill.

    Each is a permutation of range(n); natural order unless overridden.
    """
    return np.arange(n), np.arange(n)

  def parts(self):
    """Disjoint patterns whose union is this one; each has its own orders."""
    return (self,)

  def __or__(self, other):
    return Union(self, other)

  def __and__(self, other):
    return Intersection(self, other)

  def __sub__(self, other):
    return Difference(self, other)

  def __bool__(self):
    raise TypeError("combine patterns with | & -, not with and/or/not")

  def __str__(self):
    """An expression that `parse` reads, if the pattern is of this module."""
    required = [
      str(getattr(self, field.name))
      for field in dataclasses.fields(self)
      if field.default is dataclasses.MISSING
    ]
    changed = [
      f"{field.name}={getattr(self, field.name)}"
      for field in dataclasses.fields(self)
      if field.default not in (dataclasses.MISSING, getattr(self, field.name))
    ]
    return f"{type(self).__name__}({', '.join(required + changed)})"

  def matrix(self, n):
    """The set as booleans [n, n], row = query: reference and picture."""
    i = np.arange(n)
    return np.broadcast_to(self.mask(i[:, None], i), (n, n))

  def keys(self, i, n):
    """The sorted positions that query i attends to."""
    k = np.arange(n)
    return np.flatnonzero(np.broadcast_to(self.mask(i, k), (n,)))

  def pairs(self, n):
    """The exact number of pairs, without an n x n array."""
    return sum(_count(part, n) for part in self.parts())

  def layout(self, n, tile):
    """The tiles that hold pairs, in this pattern's own orders: a `Layout`."""
    return _layout(self, n, tile)


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
    _check_positive(self, "window")

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
    _check_positive(self, "window", "dilation")

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
    _check_positive(self, "stride")

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
    _check_positive(self, "size")
    _check_not_negative(self, "previous")

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
    _check_positive(self, "size", "width")
    _check_not_negative(self, "shift")
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
    _check_positive(self, "window")

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
    _check_positive(self, "size")

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
    _check_positive(self, "size", "num", "last")
    _check_not_negative(self, "seed", "first")

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
    _check_positive(self, "window", "num_global")

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
    _check_positive(self, "block", "num_global", "num_random")
    if self.window < 1 or self.window % 2 == 0:
      raise ValueError(f"{self}: window must be an odd number of blocks")
    _check_not_negative(self, "seed")

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
    _check_positive(self, "columns", "channels")
    _check_not_negative(self, "previous")

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
    _check_positive(self, "columns", "channels")

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
    _check_positive(self, "height", "width", "columns", "channels")

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


@dataclasses.dataclass(frozen=True)
class Union(Pattern):
  """Pairs in either pattern."""

  left: Pattern
  right: Pattern

  def __str__(self):
    return f"{_operand(self.left)} | {_operand(self.right)}"

  def mask(self, q, k):
    return self.left.mask(q, k) | self.right.mask(q, k)

  def parts(self):
    parts = self.left.parts(), self.right.parts()
    # What runs in natural order runs together.
    if all(_is_natural(part) for part in itertools.chain(*parts)):
      return (self,)
    return parts[0] + tuple(part - self.left for part in parts[1])


@dataclasses.dataclass(frozen=True)
class Intersection(Pattern):
  """Pairs in both patterns, run in the orders of the left one."""

  left: Pattern
  right: Pattern

  def __str__(self):
    return f"{_operand(self.left)} & {_operand(self.right)}"

  def mask(self, q, k):
    return self.left.mask(q, k) & self.right.mask(q, k)

  def orders(self, n):
    return self.left.orders(n)

  def parts(self):
    parts = self.left.parts()
    return tuple(p & self.right for p in parts) if len(parts) > 1 else (self,)


@dataclasses.dataclass(frozen=True)
class Difference(Pattern):
  """Pairs of the left pattern that are not in the right one."""

  left: Pattern
  right: Pattern

  def __str__(self):
    return f"{_operand(self.left)} - {_operand(self.right)}"

  def mask(self, q, k):
    return self.left.mask(q, k) & ~self.right.mask(q, k)

  def orders(self, n):
    return self.left.orders(n)

  def parts(self):
    parts = self.left.parts()
    return tuple(p - self.right for p in parts) if len(parts) > 1 else (self,)


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
  """The tiles of one pattern that hold pairs, sorted by query tile, key tile.

  rows, cols: tile indices of queries and of keys, in the two orders.
  pairs: how many pairs each tile holds.
  full: whether that is all of the tile's positions.
  """

  tile: int
  query_order: np.ndarray
  key_order: np.ndarray
  rows: np.ndarray
  cols: np.ndarray
  pairs: np.ndarray
  full: np.ndarray

  @property
  def fill(self):
    """Share of the computed tile area that holds pairs."""
    return self.pairs.sum() / max(1, len(self.pairs) * self.tile**2)


@functools.lru_cache(maxsize=256)
def _layout(pattern, n, tile):
  query_order, key_order = _orders(pattern, n)
  rows, cols, pairs = [], [], []
  for size, r, c, count in _cover(pattern, n, tile):
    # A full node larger than a tile is laid out as the tiles it spans.
    span = size // tile
    i = np.arange(span)
    r, c = np.broadcast_arrays(
      r[:, None, None] * span + i[:, None], c[:, None, None] * span + i
    )
    if span > 1:
      count = _area(r, c, tile, n)
    rows.append(r.ravel())
    cols.append(c.ravel())
    pairs.append(count.ravel())
  rows, cols, pairs = map(np.concatenate, (rows, cols, pairs))
  order = np.lexsort((cols, rows))
  order = order[pairs[order] > 0]
  rows, cols, pairs = rows[order], cols[order], pairs[order]
  full = pairs == _area(rows, cols, tile, n)
  return Layout(tile, query_order, key_order, rows, cols, pairs, full)


@functools.lru_cache(maxsize=256)
def _count(pattern, n):
  return sum(int(count.sum()) for *_, count in _cover(pattern, n, 64))


def _cover(pattern, n, tile):
  """Covers the pairs with nodes: yields (size, rows, cols, pairs in each).

  Starts from one node over everything. Nodes without pairs are dropped, full
  ones are kept whole, undecided ones are split in four down to `tile`, where
  the last are counted position by position. So the work follows the outline
  of the pattern, not n x n.
  """
  if n < 1 or tile < 1:
    raise ValueError(f"{n=} and {tile=} must be at least 1")
  query_order, key_order = _orders(pattern, n)
  rows = cols = np.zeros(1, np.int64)
  size = tile << (-(-n // tile) - 1).bit_length()
  while True:
    grid = bounds.Grid(size, rows, cols)
    truth = bounds.truth(
      pattern.mask(grid.query(query_order), grid.key(key_order))
    )
    must = np.broadcast_to(truth.must, rows.shape)
    undecided = np.broadcast_to(truth.may, rows.shape) & ~must
    full = rows[must], cols[must]
    yield size, *full, _area(*full, size, n)
    rows, cols = rows[undecided], cols[undecided]
    if size == tile:
      break
    size //= 2
    rows = (2 * rows[:, None] + (0, 0, 1, 1)).ravel()
    cols = (2 * cols[:, None] + (0, 1, 0, 1)).ravel()
    inside = (rows * size < n) & (cols * size < n)
    rows, cols = rows[inside], cols[inside]
  counts = _count_pairs(pattern, query_order, key_order, tile, rows, cols)
  yield tile, rows, cols, counts


def _orders(pattern, n):
  return tuple(x.astype(np.int32) for x in pattern.orders(n))


def _area(rows, cols, size, n):
  """Positions in each node; those at the end of the sequence are cut."""
  return np.clip(n - rows * size, 0, size) * np.clip(n - cols * size, 0, size)


def _count_pairs(pattern, query_order, key_order, tile, rows, cols):
  """The number of pairs in each of the tiles (rows, cols), by looking."""
  counts = np.zeros(len(rows), np.int64)
  offsets = np.arange(tile)
  chunk = max(1, 2**18 // tile**2)  # 256K pairs at a time: they fit a cache
  for start in range(0, len(rows), chunk):
    here = slice(start, start + chunk)
    q = rows[here, None, None] * tile + offsets[:, None]
    k = cols[here, None, None] * tile + offsets
    inside = (q < len(query_order)) & (k < len(key_order))
    hit = inside & pattern.mask(
      np.take(query_order, q, mode="clip"), np.take(key_order, k, mode="clip")
    )
    counts[here] = hit.sum((1, 2))
  return counts


def factorize(name, *, stride, window, width, num_summaries, head=0):
  """The factors of a named factorization, or of an expression, for a head.

  dense, local, strided, fixed: Child et al. 2019, section 4.3. Fixed
  attention goes through its block first and its summary second, so the order
  matters for what two layers reach.

  fixed_openai, fixed_deepspeed, fixed_lra: what other codebases call fixed,
  both factors in one head. In openai/sparse_attention each head has its own
  summary, counted from the end of the block. DeepSpeed's, causal, is the same
  set by whole blocks: `stride` is its num_local_blocks * block, `width` its
  num_global_blocks * block, `num_summaries` its num_different_global_patterns.
  In long-range-arena the first position of each block is a summary, too.

  Any other name is an expression (see `parse`).
  """
  if num_summaries < 1:
    raise ValueError(f"{num_summaries=} must be at least 1")
  if name not in FACTORIZATIONS:
    return tuple(heads[head % len(heads)] for heads in parse(name))
  if name.startswith("fixed"):
    block, summary = Block(stride), Summary(stride, width, head % num_summaries)
  match name:
    case "dense":
      return (Causal(),)
    case "local":
      return (Local(window),)
    case "strided":
      return Local(window), Strided(stride)
    case "fixed":
      return block, summary
    case "fixed_openai" | "fixed_deepspeed":
      return (block | summary,)
    case "fixed_lra":
      return (block | summary | Summary(stride, 1, stride - 1),)


FACTORIZATIONS = (
  "dense",
  "local",
  "strided",
  "fixed",
  "fixed_openai",
  "fixed_deepspeed",
  "fixed_lra",
)
MODES = ("interleaved", "merged", "heads")


def parse(text):
  """The factors of an expression over the patterns of this module.

  Factors are separated by commas; a factor is a pattern in the algebra
  | & -, or a tuple of patterns that the heads use in turn. Returns a tuple of
  tuples.

  >>> for heads in parse("(Local(4), Local(8)), BigBird(32) | Strided(8)"):
  ...   print(*heads, sep=" and ")
  Local(4) and Local(8)
  BigBird(block=32) | Strided(8)
  """
  try:
    tree = ast.parse(text.strip(), mode="eval").body
  except SyntaxError:
    raise _unknown(text) from None
  factors = tree.elts if isinstance(tree, ast.Tuple) else [tree]
  heads = [f.elts if isinstance(f, ast.Tuple) else [f] for f in factors]
  if not factors or not all(heads):
    raise _unknown(text)
  return tuple(tuple(_evaluate(node, text) for node in h) for h in heads)


_OPERATORS = {
  ast.BitOr: operator.or_,
  ast.BitAnd: operator.and_,
  ast.Sub: operator.sub,
}


def _evaluate(node, text):
  match node:
    case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
      sides = _evaluate(left, text), _evaluate(right, text)
      return _OPERATORS[type(op)](*sides)
    case ast.Call(ast.Name(name), args, keywords) if name in CATALOGUE:
      args = [_constant(arg) for arg in args]
      keywords = {k.arg: _constant(k.value) for k in keywords}
      try:
        return CATALOGUE[name](*args, **keywords)
      except TypeError as error:
        message = str(error).replace("__init__()", "")
        raise ValueError(f"attention.pattern {text!r}: {message}") from None
  raise _unknown(ast.unparse(node))


def _constant(node):
  try:
    return ast.literal_eval(node)
  except ValueError:
    raise _unknown(ast.unparse(node)) from None


def _unknown(name):
  return ValueError(
    f"unknown attention.pattern {name!r}; known: {', '.join(FACTORIZATIONS)},"
    f" and combinations by | & - and commas of {', '.join(CATALOGUE)}"
  )


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


def assign(name, mode, *, num_layers, num_heads, cycle=(), **settings):
  """Patterns of all layers: a tuple (layers) of tuples (heads).

  interleaved: layer r uses factor cycle[r % len(cycle)], by default 0, 1, ...
  merged: every head uses the union of all factors.
  heads: head h uses factor h % p. (Section 4.2 has the three.)
  `name` and `settings` are those of `factorize`.
  """
  if mode not in MODES:
    raise ValueError(
      f"unknown attention.mode {mode!r}; known: {', '.join(MODES)}"
    )
  num_factors = len(factorize(name, **settings))
  cycle = tuple(cycle) or tuple(range(num_factors))
  if num_factors == 1:
    cycle = (0,)  # nothing to take turns: another pattern's cycle does no harm
  if not all(m in range(num_factors) for m in cycle):
    raise ValueError(
      f"attention.cycle {cycle} must hold factors 0 to {num_factors - 1}"
      f" of {name!r}"
    )

  def pattern(layer, head):
    if mode == "heads":
      # Heads of the same factor count on, so that they see every summary.
      factors = factorize(name, head=head // num_factors, **settings)
      return factors[head % num_factors]
    factors = factorize(name, head=head, **settings)
    if mode == "merged":
      return functools.reduce(Pattern.__or__, factors)
    return factors[cycle[layer % len(cycle)]]

  return tuple(
    tuple(pattern(layer, head) for head in range(num_heads))
    for layer in range(num_layers)
  )


def first_leak(pattern, n):
  """(query, key) of the first key that an earlier query sees, or None."""
  late = pattern - Causal()
  if not late.pairs(n):
    return None
  # The key is the last position of the shortest sequence that has a pair.
  k = bisect.bisect_left(range(n), 1, key=lambda last: late.pairs(last + 1))
  return int(np.argmax(late.mask(np.arange(k), k))), k


def reach(layers, n):
  """Booleans [n, n]: which input each position sees through all layers.

  layers: tuple (layers) of tuples (heads), as `assign` gives them. The
  residual stream counts: every position keeps what it has. A causal network
  is complete when this equals `Causal().matrix(n)`.
  """
  seen = np.eye(n, dtype=np.float32)
  for heads in layers:
    step = np.eye(n, dtype=bool)
    for pattern in set(heads):
      step = step | pattern.matrix(n)
    seen = np.minimum(step.astype(np.float32) @ seen, 1)
  return seen > 0


def _operand(pattern):
  combined = isinstance(pattern, (Union, Intersection, Difference))
  return f"({pattern})" if combined else str(pattern)


def _is_natural(pattern):
  """Whether a pattern that is one part runs in natural order."""
  match pattern:
    case Intersection(left, _) | Difference(left, _):
      return _is_natural(left)
  return type(pattern).orders is Pattern.orders


def _within(distance, reach):
  """Whether a distance is at most `reach`, on either side."""
  return (distance <= reach) & (-reach <= distance)


def _by_residue(n, period):
  """Positions by residue: those of one residue side by side."""
  order = np.argsort(np.arange(n) % period, kind="stable")
  return order, order


def _check_positive(pattern, *fields):
  _check_integers(pattern, *fields)
  for field in fields:
    if getattr(pattern, field) < 1:
      raise ValueError(f"{pattern}: {field} must be at least 1")


def _check_not_negative(pattern, *fields):
  _check_integers(pattern, *fields)
  for field in fields:
    if getattr(pattern, field) < 0:
      raise ValueError(f"{pattern}: {field} must not be negative")


def _check_integers(pattern, *fields):
  for field in fields:
    value = getattr(pattern, field)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
      raise ValueError(f"{pattern}: {field} must be an integer")
    if abs(value) >= 2**31:
      raise ValueError(f"{pattern}: {field} must fit 32 bits")
  if not isinstance(getattr(pattern, "causal", True), (bool, np.bool_)):
    raise ValueError(f"{pattern}: causal must be True or False")
