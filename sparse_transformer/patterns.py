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

import dataclasses
import functools

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
class Local(Pattern):
  """The last `window` keys, the query itself included.

  The released code has exactly `window` keys; the paper's formula has one
  more (section 4.3).
  """

  window: int

  def __post_init__(self):
    _check_positive(self, "window")

  def mask(self, q, k):
    return (k <= q) & (q - k < self.window)


@dataclasses.dataclass(frozen=True)
class Strided(Pattern):
  """Every `stride`-th key back from the query itself: its column."""

  stride: int

  def __post_init__(self):
    _check_positive(self, "stride")

  def mask(self, q, k):
    return (k <= q) & (q % self.stride == k % self.stride)

  def orders(self, n):
    # Column after column: each column then is a dense causal block.
    i = np.arange(n)
    order = np.argsort(i % self.stride, kind="stable")
    return order, order


@dataclasses.dataclass(frozen=True)
class Block(Pattern):
  """The keys so far in the query's own block of `size` positions."""

  size: int

  def __post_init__(self):
    _check_positive(self, "size")

  def mask(self, q, k):
    return (k <= q) & (q // self.size == k // self.size)


@dataclasses.dataclass(frozen=True)
class Summary(Pattern):
  """The summary columns of every block of `size` so far.

  They are the `shift`-th group of `width` positions, counted from the end of
  the block: shift 0 is the last `width` positions (section 4.3, A^(2) of
  fixed attention; distinct groups for distinct heads).
  """

  size: int
  width: int
  shift: int = 0

  def __post_init__(self):
    _check_positive(self, "size", "width")
    _check_integers(self, "shift")
    if not 0 <= self.shift * self.width <= self.size - self.width:
      raise ValueError(
        f"{self} does not fit: (shift + 1) * width must be at most size"
      )

  def _is_summary(self, k):
    end = self.size - self.shift * self.width
    return (k % self.size >= end - self.width) & (k % self.size < end)

  def mask(self, q, k):
    return (k <= q) & self._is_summary(k)

  def orders(self, n):
    # Summary columns side by side, in front of the keys nobody reads.
    i = np.arange(n)
    return i, np.argsort(~self._is_summary(i), kind="stable")


@dataclasses.dataclass(frozen=True)
class Union(Pattern):
  """Pairs in either pattern."""

  left: Pattern
  right: Pattern

  def mask(self, q, k):
    return self.left.mask(q, k) | self.right.mask(q, k)

  def parts(self):
    rest = tuple(part - self.left for part in self.right.parts())
    return self.left.parts() + rest


@dataclasses.dataclass(frozen=True)
class Intersection(Pattern):
  """Pairs in both patterns, run in the orders of the left one."""

  left: Pattern
  right: Pattern

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
  chunk = max(1, 2**22 // tile**2)  # 4M booleans at a time
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
  """The factors of a named factorization, in the order of its definition.

  Fixed attention goes through its block first and its summary second
  (section 4.3), so the order matters for what two layers reach.
  """
  if num_summaries < 1:
    raise ValueError(f"{num_summaries=} must be at least 1")
  match name:
    case "dense":
      return (Causal(),)
    case "local":
      return (Local(window),)
    case "strided":
      return Local(window), Strided(stride)
    case "fixed":
      return Block(stride), Summary(stride, width, head % num_summaries)
  raise ValueError(
    f"unknown attention.pattern {name!r}; known: {', '.join(FACTORIZATIONS)}"
  )


FACTORIZATIONS = ("dense", "local", "strided", "fixed")
MODES = ("interleaved", "merged", "heads")


def assign(name, mode, *, num_layers, num_heads, cycle=(), **settings):
  """Patterns of all layers: a tuple (layers) of tuples (heads).

  interleaved: layer r uses factor cycle[r % len(cycle)], by default 0, 1, ...
  merged: every head uses the union of all factors.
  heads: head h uses factor h % p. (Section 4.2 has the three.)
  `settings` are those of `factorize`.
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


def _check_positive(pattern, *fields):
  _check_integers(pattern, *fields)
  for field in fields:
    if getattr(pattern, field) < 1:
      raise ValueError(f"{pattern}: {field} must be at least 1")


def _check_integers(pattern, *fields):
  for field in fields:
    value = getattr(pattern, field)
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
      raise ValueError(f"{pattern}: {field} must be an integer")
