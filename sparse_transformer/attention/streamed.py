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
from sparse_transformer.attention.contract import (
  Case,
  Heads,
  Plan,
  Table,
  make_plan,
)
from sparse_transformer.patterns import Layout, Pattern, analysis

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


@functools.partial(
  jax.tree_util.register_dataclass,
  data_fields=["rows", "first", "cols"],
  meta_fields=["single"],
)
@dataclasses.dataclass(frozen=True, eq=False)
class Steps:
  """The steps of one part: tables, int32.

  Attributes:
    rows: [rows], the query tiles that have steps.
    first: [rows + 1], where the steps of each row begin.
    cols: [steps, span], the key tiles of each step, padded with -1.
    single: whether every row has exactly one step.
  """

  rows: Table
  first: Table
  cols: Table
  single: bool


unsupported = contract.nothing_unsupported


def tile_size(part: Pattern, case: Case) -> int:
  """The tile that `plans` chooses for a part."""
  sizes = _sizes(part, case.length)
  if len(sizes) == 1:
    return sizes[0]
  return _cheapest(part, case.length, sizes)[0]


@functools.lru_cache(maxsize=256)
def plan(part: Pattern, n: int, tile: int = 0) -> Plan:
  """The cheapest plan of a part; `tile` 0 chooses the tile, too."""
  tile, span = _cheapest(part, n, (tile,) if tile else _sizes(part, n))
  layout = part.layout(n, tile)
  (steps,) = _steps_of([layout], span)
  return make_plan(layout, part, n, steps)


def shares(
  part: Pattern, layouts: Sequence[Layout], num_heads: int
) -> list[Steps]:
  """The tables with which devices share a part, all of the same shapes."""
  del part, num_heads
  counts = [np.unique(x.rows, return_counts=True)[1] for x in layouts]
  _, span = _best_span(np.concatenate(counts), layouts[0].tile)
  return _steps_of(layouts, span)


def _steps_of(layouts: Sequence[Layout], span: int) -> list[Steps]:
  """The tables of layouts, of the same shapes, with `span` tiles in a step."""
  rows = _rows_of(layouts)
  counts = [
    np.bincount(x.rows, minlength=len(x.query_order))[r]
    for x, r in zip(layouts, rows, strict=True)
  ]
  num_steps = [-(-c // span) for c in counts]
  single = max(map(np.max, num_steps)) <= 1
  if single:  # also of rows without tiles
    num_steps = [np.ones_like(x) for x in num_steps]
  most = max(map(np.sum, num_steps))
  found = []
  for layout, row, count, steps in zip(
    layouts, rows, counts, num_steps, strict=True
  ):
    # The tiles of each row in order, `span` per step.
    first = np.append(0, np.cumsum(steps))
    order = np.argsort(row, kind="stable")
    start = np.cumsum(count[order]) - count[order]
    place = np.arange(len(layout.cols)) - np.repeat(start, count[order])
    step = np.repeat(first[:-1][order], count[order]) + place // span
    cols = np.full((most, span), -1, np.int32)
    cols[step, place % span] = layout.cols
    found.append(Steps(row, first.astype(np.int32), cols, single))
  return found


def _rows_of(layouts):
  """The query tiles that have steps, int32; as many in each layout.

  Where there are fewer, tiles that have none are among them.
  """
  rows = [np.unique(layout.rows) for layout in layouts]
  most = max(map(len, rows))
  found = []
  for layout, used in zip(layouts, rows, strict=True):
    every = np.arange(-(-len(layout.query_order) // layout.tile))
    others = np.setdiff1d(every, used)[: most - len(used)]
    found.append(np.append(used, others).astype(np.int32))
  return found


def plans(
  patterns: tuple[Pattern, ...], case: Case, tile: int = 0
) -> list[tuple[Plan, Heads]]:
  """The plans of all parts, each with its heads."""
  return contract.plan_parts(plan, patterns, case.length, tile)


def _sizes(part, n):
  """The tile sizes to try, in ascending order."""
  *smaller, largest = sorted({min(size, n) for size in TILE_SIZES})

  def is_laid_out(size):
    num_rows = -(-n // size)
    if num_rows**2 <= MAX_LAID_OUT:
      return True
    return analysis.count_tiles(part, n, size) <= MAX_LAID_OUT

  return *filter(is_laid_out, smaller), largest


@functools.lru_cache(maxsize=256)
def _cheapest(part, n, sizes):
  """The (tile, span) of lowest cost."""
  costs = {}
  for size in sizes:
    _, counts = np.unique(part.layout(n, size).rows, return_counts=True)
    cost, span = _best_span(counts, size)
    costs[size, span] = cost
  return min(costs, key=costs.__getitem__)


def _best_span(counts, size):
  """The lowest cost of rows with so many tiles, and the span that has it."""
  costs = {}
  for span in range(1, max(1, min(MAX_KEYS // size, MAX_SPAN)) + 1):
    num_steps = int((-(-counts // span)).sum())
    is_single = num_steps == len(counts)
    extra = TILE_COST * span if is_single else STEP_COST
    costs[span] = num_steps * (size**2 * span + extra)
  span = min(costs, key=costs.__getitem__)
  return costs[span], span


def forward(
  plan: Plan, q_BLHK: jax.Array, k_BLHK: jax.Array, v_BLHE: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """(out_BLHE, lse_BLH) over the pairs of a plan, in its orders."""
  group, tile = _group(plan, q_BLHK), plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)

  def body(i, carry):
    rows = _rows(plan, i, group)
    q = _take(q_BLHK, rows, tile) * online_softmax.scale(q_BLHK)
    q_at = _positions(plan.queries.positions, rows, tile)

    def process(j):
      cols = _cols(plan, j, group)
      key = _take(k_BLHK, cols, tile), _take(v_BLHE, cols, tile)
      return online_softmax.softmax_of_tile(_mask(plan, q_at, cols), q, key)

    if plan.tables.single:
      state = process(i)
    else:
      out = jnp.zeros_like(q, dtype, (*q.shape[:-1], v_BLHE.shape[-1]))
      state = lax.fori_loop(
        *_steps(plan, i),
        lambda j, state: online_softmax.combine(state, process(j)),
        (out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]),
      )
    out, lse = online_softmax.finish(*state)
    out_BLHE, lse_BLH = carry
    return _put(out_BLHE, out, rows, tile), _put(
      lse_BLH, lse[..., 0], rows, tile
    )

  lse_BLH = jnp.full_like(q_BLHK, -jnp.inf, dtype, q_BLHK.shape[:3])
  shape = *lse_BLH.shape, v_BLHE.shape[-1]
  carry = jnp.zeros_like(v_BLHE, dtype, shape), lse_BLH
  return lax.fori_loop(0, len(plan.tables.rows) // group, body, carry)


def backward(
  plan: Plan,
  q_BLHK: jax.Array,
  dout_BLHE: jax.Array,
  lse_BLH: jax.Array,
  delta_BLH: jax.Array,
  k_BLHK: jax.Array,
  v_BLHE: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """(dq, dk, dv) of the pairs of a plan, with weights relative to `lse_BLH`."""
  group, tile = _group(plan, q_BLHK), plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  scale = online_softmax.scale(q_BLHK)

  def body(i, carry):
    dq_BLHK, *dkv = carry
    rows = _rows(plan, i, group)
    q, dout = _take(q_BLHK, rows, tile) * scale, _take(dout_BLHE, rows, tile)
    lse, delta = (_take(x, rows, tile)[..., None] for x in (lse_BLH, delta_BLH))
    q_at = _positions(plan.queries.positions, rows, tile)
    q_T, dout_T = online_softmax.transpose_first(q, dout)

    def process(j, carry):
      dq, dk_BLHK, dv_BLHE = carry
      cols = _cols(plan, j, group)
      k, v = _take(k_BLHK, cols, tile), _take(v_BLHE, cols, tile)
      p, ds = online_softmax.weights_and_gradients(
        _mask(plan, q_at, cols), (q, dout, lse, delta), (k, v)
      )
      ds = ds * online_softmax.scale_of_scores(q)
      p, ds = p.astype(q.dtype), ds.astype(q.dtype)
      dv = online_softmax.dot("abhet,abhts->abhes", dout_T, p).swapaxes(-1, -2)
      dk = online_softmax.dot("abhkt,abhts->abhks", q_T, ds).swapaxes(-1, -2)
      dq = dq + online_softmax.dot("abhts,abhsk->abhtk", ds, k)
      return dq, _add(dk_BLHK, dk, cols, tile), _add(dv_BLHE, dv, cols, tile)

    carry = jnp.zeros_like(q, dtype), *dkv
    if plan.tables.single:
      dq, *dkv = process(i, carry)
    else:
      dq, *dkv = lax.fori_loop(*_steps(plan, i), process, carry)
    return _put(dq_BLHK, dq * scale, rows, tile), *dkv

  zeros = tuple(jnp.zeros_like(x, dtype) for x in (q_BLHK, k_BLHK, v_BLHE))
  return lax.fori_loop(0, len(plan.tables.rows) // group, body, zeros)


def _group(plan, q_BLHK):
  """How many query tiles to process together: a divisor of their number."""
  if not plan.tables.single:
    return 1
  b, _, h, _ = q_BLHK.shape
  num_rows, span = len(plan.tables.rows), plan.tables.cols.shape[1]
  most = min(
    STEP_SCORES // (b * h * plan.tile**2 * span),
    MAX_TILES_TOGETHER // span,
    num_rows,
  )
  return max(a for a in range(1, max(1, most) + 1) if num_rows % a == 0)


def _steps(plan, i):
  """Where the steps of the i-th row begin and end."""
  first = jnp.asarray(plan.tables.first)
  return first[i], first[i + 1]


# Tile indices are tables [A, C]: C tiles for each query tile of a group.


def _rows(plan, i, group):
  """The i-th group of query tiles: [A, 1]."""
  rows = jnp.asarray(plan.tables.rows)
  return lax.dynamic_slice_in_dim(rows, i * group, group)[:, None]


def _cols(plan, j, group):
  """The key tiles of the j-th group of steps: [A, C]."""
  cols = jnp.asarray(plan.tables.cols)
  return lax.dynamic_slice_in_dim(cols, j * group, group)


def _mask(plan, q_at, cols):
  """The pairs of tiles of queries and of keys, bool [A, 1, 1, T, S]."""
  k_at = _positions(plan.keys.positions, cols, plan.tile)
  return online_softmax.pairs(plan.pattern, q_at, k_at)[:, None, None]


def _positions(positions, tiles_AC, tile):
  """Positions [A, S], -1 where a tile is -1."""
  positions_NT = jnp.asarray(positions).reshape(-1, tile)
  is_tile = tiles_AC[..., None] >= 0
  positions_ACT = jnp.where(is_tile, positions_NT[tiles_AC.clip(0)], -1)
  return positions_ACT.reshape(len(tiles_AC), -1)


def _take(x_BLH, tiles_AC, tile):
  """Tiles of x, heads first: [A, B, H, S, ...]; an arbitrary tile for -1."""
  # A gather: one operation, however many tiles. Concatenated slices are copied
  # at a fifth of its rate by the CPU compiler of jax 0.10.2.
  take = functools.partial(_slice, x_BLH, tile=tile)
  x_ACBTH = jax.vmap(jax.vmap(take))(tiles_AC)
  x_ABHCT = jnp.moveaxis(x_ACBTH, (2, 4), (1, 2))
  return x_ABHCT.reshape(*x_ABHCT.shape[:3], -1, *x_ABHCT.shape[5:])


def _slice(x_BLH, i, tile):
  """The i-th tile of x: [B, T, H, ...]."""
  return lax.dynamic_slice_in_dim(x_BLH, i * tile, tile, 1)


def _put(x_BLH, new, tiles_A1, tile):
  """x_BLH with new tiles: undoes `_take` for one tile each."""
  for i, tile_BHT in zip(tiles_A1[:, 0], new, strict=True):
    tile_BTH = tile_BHT.swapaxes(1, 2)
    x_BLH = lax.dynamic_update_slice_in_dim(x_BLH, tile_BTH, i * tile, 1)
  return x_BLH


def _add(x_BLH, new, tiles_AC, tile):
  """x_BLH with new [A, B, H, S, ...] added to its tiles."""
  for tiles_C, new_BHS in zip(tiles_AC, new, strict=True):
    parts = jnp.split(new_BHS, len(tiles_C), 2)
    for i, new_BHT in zip(tiles_C, parts, strict=True):
      new_BTH = _slice(x_BLH, i, tile) + new_BHT.swapaxes(1, 2)
      x_BLH = lax.dynamic_update_slice_in_dim(x_BLH, new_BTH, i * tile, 1)
  return x_BLH
