"""The executor for CPUs: a few query tiles at a time, in cache.

A step processes a tile of queries with a few of its key tiles, for all
sequences and heads together; its scores stay in cache. Key tiles stream past a
query tile with an online softmax. Where each query tile has a single step, as
in local and block attention, several are processed together, since small matrix
products leave cores idle.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.executors import tiles
from sparse_transformer.attention.heads import group_heads, heads_of_parts
from sparse_transformer.attention.orders import Slice, make_order, orders_of
from sparse_transformer.patterns import Layout, Pattern, analysis

# Positions in tiles of the queries and the keys of a slice.
SLICE_TILE, SLICE_KEYS = 64, 256
TILE_SIZES = 64, 96, 128, 192, 256  # in positions, to choose from
MAX_LAID_OUT = 2**20  # tiles; sizes with more are not tried, except the largest
MAX_KEYS = 512  # keys in a step, for one query tile
# Key tiles in a step, for one query tile and for all that are processed
# together: each adds lines to the program, whose size must not grow with n.
MAX_SPAN, MAX_TILES_TOGETHER = 8, 32
# The overhead of a loop step, in units of one score of one head, and that of a
# key tile outside a loop: fitted to steps of 64 x 64 to 256 x 512 on 2
# cores, with jax 0.10.2 and 0.12.0.
STEP_COST, TILE_COST = 10_000, 1_300
# The most scores, over all heads, of a step that processes tiles together.
STEP_SCORES = 300_000


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StepTables:
  """The steps of one part: tables, int32."""

  # [rows + 1], where the steps of each query tile begin.
  first: contract.Table
  # [steps, span], the key tiles of each step, padded with -1.
  cols: contract.Table
  # Whether every query tile has exactly one step.
  single: bool = dataclasses.field(metadata=contract.STATIC)
  # Keys in a tile, if they differ from the queries in one.
  num_keys: int = dataclasses.field(default=0, metadata=contract.STATIC)


unsupported = contract.nothing_unsupported


def tile_size(part: Pattern, case: contract.Case) -> int:
  """See `contract.Executor`."""
  n = case.length
  sizes = (min(case.tile, n),) if case.tile else _sizes(part, n)
  return sizes[0] if len(sizes) == 1 else _cheapest(part, n, sizes)[0]


@functools.lru_cache(maxsize=256)
def plan(part: Pattern, n: int, tile: int = 0) -> contract.Plan:
  """The cheapest plan of a part; `tile` 0 also chooses the tile."""
  tile, span = _cheapest(part, n, (tile,) if tile else _sizes(part, n))
  layout = part.layout(n, tile)
  (steps,) = _steps_of([layout], span)
  return contract.Plan(part, tile, steps, *orders_of(layout))


def plans(patterns: tuple[Pattern, ...], case: contract.Case) -> contract.Plans:
  """The plans of all parts, each with its heads."""
  n, tile = case.length, min(case.tile, case.length)
  parts = heads_of_parts(patterns, n)
  return [(plan(part, n, tile), heads) for part, heads in parts]


def slice_plans(
  patterns: tuple[Pattern, ...], num_queries: int, n: int, first: jax.Array
) -> contract.Plans:
  """The plans of some queries, from position `first` on, and n keys.

  Which tiles have pairs is found at run time: the others are skipped.
  """
  tile, num_keys = min(num_queries, SLICE_TILE), min(n, SLICE_KEYS)
  num_rows, num_cols = -(-num_queries // tile), -(-n // num_keys)
  cols = np.tile(np.arange(num_cols, dtype=np.int32), num_rows)[:, None]
  starts = num_cols * np.arange(num_rows + 1, dtype=np.int32)
  steps = StepTables(starts, cols, False, num_keys)
  own = make_order(np.arange(num_queries), num_rows * tile)
  keys = make_order(np.arange(n), num_cols * num_keys)
  queries = Slice(own, first)
  return [
    (contract.Plan(pattern, tile, steps, queries, keys), heads)
    for pattern, heads in group_heads([(p,) for p in patterns]).items()
  ]


def shares(
  part: Pattern, layouts: Sequence[Layout], case: contract.Case
) -> list[StepTables]:
  """The tables with which devices share a part, all of the same shapes."""
  del part, case
  counts = [np.unique(x.rows, return_counts=True)[1] for x in layouts]
  _, span = _best_span(np.concatenate(counts), layouts[0].tile)
  return _steps_of(layouts, span)


def _steps_of(layouts: Sequence[Layout], span: int) -> list[StepTables]:
  """The tables of layouts, of the same shapes, with `span` tiles in a step."""
  num_rows = -(-len(layouts[0].query_order) // layouts[0].tile)
  counts = [np.bincount(x.rows, minlength=num_rows) for x in layouts]
  num_steps = -(-np.stack(counts) // span)
  single = num_steps.max() <= 1
  if single:  # including rows without tiles
    num_steps = np.ones_like(num_steps)
  most = num_steps.sum(1).max()
  found = []
  for layout, count, steps in zip(layouts, counts, num_steps, strict=True):
    # The tiles of each row in order, `span` per step.
    first = np.append(0, np.cumsum(steps)).astype(np.int32)
    start = np.repeat(np.cumsum(count) - count, count)
    place = np.arange(len(start)) - start
    cols = np.full((most, span), -1, np.int32)
    cols[first[layout.rows] + place // span, place % span] = layout.cols
    found.append(StepTables(first, cols, bool(single)))
  return found


def _sizes(part, n):
  """The tile sizes to try, in ascending order."""
  *smaller, largest = sorted({min(size, n) for size in TILE_SIZES})
  few = (
    size
    for size in smaller
    if (-(-n // size)) ** 2 <= MAX_LAID_OUT
    or analysis.count_tiles(part, n, size) <= MAX_LAID_OUT
  )
  return *few, largest


@functools.lru_cache(maxsize=256)
def _cheapest(part, n, sizes):
  """The (tile, span) of lowest cost."""
  found = []
  for size in sizes:
    _, counts = np.unique(part.layout(n, size).rows, return_counts=True)
    found.append((*_best_span(counts, size), size))
  _, span, size = min(found, key=lambda x: x[0])
  return size, span


def _best_span(counts, size):
  """The lowest cost of rows with `counts` tiles, and the span that has it."""
  costs = []
  for span in range(1, max(1, min(MAX_KEYS // size, MAX_SPAN)) + 1):
    num_steps = int((-(-counts // span)).sum())
    is_single = num_steps == len(counts)
    extra = TILE_COST * span if is_single else STEP_COST
    costs.append((num_steps * (size**2 * span + extra), span))
  return min(costs)


def forward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, jax.Array]:
  """See `contract.Executor`."""
  steps = _Tiles(plan, queries, keys)
  return online_softmax.forward(steps, queries, keys, plan.scores)


def backward(
  plan: contract.Plan, queries: contract.Queries, keys: contract.Keys
) -> tuple[jax.Array, ...]:
  """See `contract.Executor`."""
  steps = _Tiles(plan, queries, keys)
  return online_softmax.backward(steps, queries, keys, plan.scores)


class _Tiles(online_softmax.Steps):
  """The steps of a plan: C tiles for each of A query tiles of a group.

  The R query heads of a key head are further rows of its tiles: [A, B, G, R T,
  ...].
  """

  def __init__(self, plan, queries, keys):
    self.plan, self.tile = plan, plan.tile
    self.single = plan.tables.single
    # Within a single step, few tiles have no pairs.
    is_slice = plan.tables.num_keys > 0
    self.num_keys = plan.tables.num_keys or plan.tile
    self.skips = is_slice or (queries.segments is not None and not self.single)
    batch, _, heads, _ = queries.q.shape
    self.rows = heads // keys.k.shape[2]  # R
    self.size = self._group_size(batch, heads)
    self.num = (len(plan.tables.first) - 1) // self.size

  def _group_size(self, batch, heads):
    """Number of query tiles to process together: a divisor of their total."""
    if not self.single:
      return 1
    num_rows, span = self.plan.tables.cols.shape
    most = min(
      STEP_SCORES // (contract.number(batch) * heads * self.tile**2 * span),
      MAX_TILES_TOGETHER // span,
      num_rows,
    )
    return max(a for a in range(1, max(1, most) + 1) if num_rows % a == 0)

  def bounds(self, i):
    first = jnp.asarray(self.plan.tables.first)
    return first[i], first[i + 1]

  def queries(self, i, *arrays):
    at = self._rows(i)
    return tuple(
      tiles.take_rows(x_BLH, at, self.tile, self.rows) for x_BLH in arrays
    )

  def keys(self, i, j, *arrays):
    at = self._cols(j)
    return tuple(tiles.take(x_BLH, at, self.num_keys) for x_BLH in arrays)

  def pairs(self, i, j):
    at = self._rows(i), self._cols(j)
    return tiles.take_pairs(self.plan, *at, self.num_keys, self.rows), None

  def put(self, i, x_BLH, new):
    new = tiles.by_head(new, self.rows)
    for row, tile_BHT in zip(self._rows(i)[:, 0], new, strict=True):
      x_BLH = tiles.put(x_BLH, row, tile_BHT.swapaxes(1, 2))
    return x_BLH

  def add(self, i, j, x_BLH, new):
    for cols_C, new_BHS in zip(self._cols(j), new, strict=True):
      parts = jnp.split(new_BHS, len(cols_C), 2)
      for col, tile_BHT in zip(cols_C, parts, strict=True):
        old_BTH = tiles.get(x_BLH, col, self.num_keys)
        x_BLH = tiles.put(x_BLH, col, old_BTH + tile_BHT.swapaxes(1, 2))
    return x_BLH

  def _rows(self, i):
    """The i-th group of query tiles: [A, 1]."""
    return i * self.size + jnp.arange(self.size)[:, None]

  def _cols(self, j):
    """The key tiles of the j-th group of steps: [A, C]."""
    cols = jnp.asarray(self.plan.tables.cols)
    return lax.dynamic_slice_in_dim(cols, j * self.size, self.size)
