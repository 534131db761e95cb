"""The schedule of the blocked backend for CPUs: few query tiles at a time.

A step is a tile of queries against a few of its key tiles, all batches and
heads together; its scores stay in cache. Query tiles with several steps go
through them with an online softmax. Where each has one step, as in local and
block attention, some are taken side by side, since small products leave
processors idle.
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import online_softmax as tiles
from sparse_transformer.patterns import Pattern

TILES = (64, 96, 128, 192, 256)  # positions, to choose from
MAX_KEYS = 512  # positions of keys in a step, of one query tile
# Key tiles of a step, of one query tile and of those side by side: each is
# some lines of the program, whose size must not grow with n.
MAX_TILES, MAX_TILES_BESIDE = 8, 32
# What a step of a loop costs besides its scores, counted in scores of one
# head, and what a key tile does where there is no loop: fitted to steps of
# 64 x 64 to 256 x 512 on 2 cores, jax 0.10.2 and 0.12.0.
STEP_COST, TILE_COST = 10_000, 1_300
# Scores, of all heads, that one step may have for tiles side by side.
STEP_SCORES = 300_000


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """The steps of one pattern.

  rows: [rows], the query tiles that have steps.
  first: [rows + 1], where the steps of each row begin.
  cols: [steps, span], the key tiles of each step, -1 where it has fewer.
  query_positions, key_positions: what stands at each place, -1 for padding.
    Keys behind the last visited tile are left out.
  """

  pattern: Pattern
  tile: int
  rows: np.ndarray
  first: np.ndarray
  cols: np.ndarray
  query_positions: np.ndarray
  key_positions: np.ndarray

  @property
  def scores(self):
    """Scores of one step, of one head."""
    return self.tile**2 * self.cols.shape[1]

  @property
  def cost(self):
    extra = TILE_COST * self.cols.shape[1] if self.is_single else STEP_COST
    return len(self.cols) * (self.scores + extra)

  @property
  def is_single(self):
    """Whether no row has more than one step."""
    return len(self.cols) == len(self.rows)


@functools.lru_cache(maxsize=256)
def plan(pattern, n, tile=0):
  """The cheapest `Plan`; tile 0 chooses the tile, too."""
  sizes = (tile,) if tile else sorted({min(size, n) for size in TILES})
  plans = [
    _plan(pattern, n, size, span)
    for size in sizes
    for span in range(1, max(1, min(MAX_KEYS // size, MAX_TILES)) + 1)
  ]
  return min(plans, key=lambda plan: plan.cost)


def _plan(pattern, n, tile, span):
  layout = pattern.layout(n, tile)
  rows, first, counts = np.unique(
    layout.rows, return_index=True, return_counts=True
  )
  # The tiles of each row in order, `span` to a step.
  place = np.arange(len(layout.cols)) - np.repeat(first, counts)
  first = np.append(0, np.cumsum(-(-counts // span)))
  cols = np.full((first[-1], span), -1, np.int32)
  cols[np.repeat(first[:-1], counts) + place // span, place % span] = (
    layout.cols
  )
  num_rows, num_cols = -(-n // tile), max(layout.cols, default=0) + 1
  return Plan(
    pattern,
    tile,
    rows.astype(np.int32),
    first.astype(np.int32),
    cols,
    tiles.pad(layout.query_order, num_rows * tile),
    tiles.pad(layout.key_order, num_cols * tile),
  )


def forward(plan, q_BLHK, k_BLHK, v_BLHE):
  """(out_BLHE, lse_BLH) over the pairs of a plan, in its orders."""
  group, tile = _group(plan, q_BLHK), plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)

  def body(i, carry):
    rows = _rows(plan, i, group)
    q = _take(q_BLHK, rows, tile) * tiles.scale(q_BLHK)
    query = q, _positions(plan.query_positions, rows, tile)

    def visit(j):
      cols = _cols(plan, j, group)
      key = _take(k_BLHK, cols, tile), _take(v_BLHE, cols, tile)
      positions = _positions(plan.key_positions, cols, tile)
      return tiles.visit(plan.pattern, query, (*key, positions))

    if plan.is_single:
      state = visit(i)
    else:
      out = jnp.zeros((*q.shape[:-1], v_BLHE.shape[-1]), dtype)
      state = lax.fori_loop(
        *_steps(plan, i),
        lambda j, state: tiles.combine(state, visit(j)),
        (out, jnp.full_like(out[..., :1], -jnp.inf), out[..., :1]),
      )
    out, lse = tiles.finish(*state)
    out_BLHE, lse_BLH = carry
    return _put(out_BLHE, out, rows, tile), _put(
      lse_BLH, lse[..., 0], rows, tile
    )

  lse_BLH = jnp.full(q_BLHK.shape[:3], -jnp.inf, dtype)
  carry = jnp.zeros((*lse_BLH.shape, v_BLHE.shape[-1]), dtype), lse_BLH
  return lax.fori_loop(0, len(plan.rows) // group, body, carry)


def backward(plan, q_BLHK, dout_BLHE, lse_BLH, delta_BLH, k_BLHK, v_BLHE):
  """(dq, dk, dv) of the pairs of a plan, weights taken against `lse_BLH`."""
  group, tile = _group(plan, q_BLHK), plan.tile
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  scale = tiles.scale(q_BLHK)

  def body(i, carry):
    dq_BLHK, *dkv = carry
    rows = _rows(plan, i, group)
    q, dout = _take(q_BLHK, rows, tile) * scale, _take(dout_BLHE, rows, tile)
    lse, delta = (_take(x, rows, tile)[..., None] for x in (lse_BLH, delta_BLH))
    positions = _positions(plan.query_positions, rows, tile)
    query = q, dout, lse, delta, positions
    # Transposed here, while small: a product with its left side transposed
    # runs at half the rate.
    q_T, dout_T = lax.optimization_barrier(
      (q.swapaxes(-1, -2), dout.swapaxes(-1, -2))
    )

    def visit(j, carry):
      dq, dk_BLHK, dv_BLHE = carry
      cols = _cols(plan, j, group)
      k, v = _take(k_BLHK, cols, tile), _take(v_BLHE, cols, tile)
      key = k, v, _positions(plan.key_positions, cols, tile)
      p, ds = tiles.weights(plan.pattern, query, key)
      dv = tiles.dot("abhet,abhts->abhes", dout_T, p).swapaxes(-1, -2)
      dk = tiles.dot("abhkt,abhts->abhks", q_T, ds).swapaxes(-1, -2)
      dq = dq + tiles.dot("abhts,abhsk->abhtk", ds, k)
      return dq, _add(dk_BLHK, dk, cols, tile), _add(dv_BLHE, dv, cols, tile)

    carry = jnp.zeros(q.shape, dtype), *dkv
    if plan.is_single:
      dq, *dkv = visit(i, carry)
    else:
      dq, *dkv = lax.fori_loop(*_steps(plan, i), visit, carry)
    return _put(dq_BLHK, dq * scale, rows, tile), *dkv

  zeros = tuple(jnp.zeros(x.shape, dtype) for x in (q_BLHK, k_BLHK, v_BLHE))
  return lax.fori_loop(0, len(plan.rows) // group, body, zeros)


def _group(plan, q_BLHK):
  """How many query tiles to take side by side: a divisor of their number."""
  b, _, h, _ = q_BLHK.shape
  if not plan.is_single:
    return 1
  most = min(
    STEP_SCORES // (b * h * plan.scores),
    MAX_TILES_BESIDE // plan.cols.shape[1],
    len(plan.rows),
  )
  return max(a for a in range(1, max(1, most) + 1) if len(plan.rows) % a == 0)


def _steps(plan, i):
  """Where the steps of the i-th row begin and end."""
  first = jnp.asarray(plan.first)
  return first[i], first[i + 1]


# The tiles of A query tiles side by side: A lists of the numbers of tiles.


def _rows(plan, i, group):
  """The i-th group of query tiles."""
  rows = jnp.asarray(plan.rows)
  return [[rows[i * group + a]] for a in range(group)]


def _cols(plan, j, group):
  """The key tiles of the j-th group of steps."""
  cols, span = jnp.asarray(plan.cols), plan.cols.shape[1]
  return [[cols[j * group + a, c] for c in range(span)] for a in range(group)]


def _positions(positions, lists, tile):
  """Positions [A, S], -1 where a tile is -1."""
  positions = jnp.asarray(positions)

  def take(i):
    here = lax.dynamic_slice_in_dim(positions, i * tile, tile)
    return jnp.where(i < 0, -1, here)

  return jnp.stack(
    [jnp.concatenate([*map(take, numbers)]) for numbers in lists]
  )


def _take(x_BLH, lists, tile):
  """Tiles of x, heads in front: [A, B, H, S, ...]; any one for tile -1."""

  def take(i):
    return lax.dynamic_slice_in_dim(x_BLH, i * tile, tile, 1).swapaxes(1, 2)

  return jnp.stack(
    [jnp.concatenate([*map(take, numbers)], 2) for numbers in lists]
  )


def _put(x_BLH, new, lists, tile):
  """x_BLH with new tiles: undoes `_take` for one tile a list."""
  for (i,), tile_BHT in zip(lists, new, strict=True):
    tile_BTH = tile_BHT.swapaxes(1, 2)
    x_BLH = lax.dynamic_update_slice_in_dim(x_BLH, tile_BTH, i * tile, 1)
  return x_BLH


def _add(x_BLH, new, lists, tile):
  """x_BLH with new [A, B, H, S, ...] added to its tiles."""
  for cols, new_BHS in zip(lists, new, strict=True):
    for i, new_BHT in zip(cols, jnp.split(new_BHS, len(cols), 2), strict=True):
      (old_BHT,) = _take(x_BLH, [[i]], tile)
      x_BLH = _put(x_BLH, [old_BHT + new_BHT], [[i]], tile)
  return x_BLH
