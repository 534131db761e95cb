"""Tiles of arrays that are in the orders of a plan, in plain XLA.

Several tiles are processed together: A lanes with C tiles each. The R query
heads of a key head are further rows of its tiles, so that keys are read once
for all of them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_transformer.attention import online_softmax
from sparse_transformer.attention.contract import Plan
from sparse_transformer.attention.orders import Table


def take(x_BLH: jax.Array, tiles_AC: jax.Array, tile: int) -> jax.Array:
  """Tiles of x, heads first: [A, B, H, C T, ...]; an arbitrary tile for -1."""
  # A gather: one operation, however many tiles. Concatenated slices are copied
  # at a fifth of its rate by the CPU compiler of jax 0.10.2.
  one = functools.partial(get, x_BLH, tile=tile)
  x_ACBTH = jax.vmap(jax.vmap(one))(tiles_AC)
  x_ABHCT = jnp.moveaxis(x_ACBTH, (2, 4), (1, 2))
  return x_ABHCT.reshape(*x_ABHCT.shape[:3], -1, *x_ABHCT.shape[5:])


def take_rows(
  x_BLH: jax.Array, tiles_AC: jax.Array, tile: int, rows: int
) -> jax.Array:
  """Tiles of queries: [A, B, G, R C T, ...], see `take`; R is `rows`."""
  x = take(x_BLH, tiles_AC, tile)
  if x_BLH.shape[2] == 1 < rows:  # the same for all heads
    x = jnp.tile(x, (1, 1, rows, *[1] * (x.ndim - 3)))
  return x.reshape(*x.shape[:2], -1, rows * x.shape[3], *x.shape[4:])


def by_head(x_ABGT: jax.Array, rows: int) -> jax.Array:
  """Undoes the joining of heads in `take_rows`: [A, B, H, C T, ...]."""
  a, b, _, size, *widths = x_ABGT.shape
  return x_ABGT.reshape(a, b, -1, size // rows, *widths)


def get(x_BLH: jax.Array, i: jax.Array, tile: int) -> jax.Array:
  """The i-th tile of x: [B, T, H, ...]."""
  return lax.dynamic_slice_in_dim(x_BLH, i * tile, tile, 1)


def put(x_BLH: jax.Array, i: jax.Array, tile_BTH: jax.Array) -> jax.Array:
  """x with its i-th tile replaced."""
  first = i * tile_BTH.shape[1]
  return lax.dynamic_update_slice_in_dim(x_BLH, tile_BTH, first, 1)


def take_pairs(
  plan: Plan,
  queries_AC: jax.Array,
  keys_AC: jax.Array,
  num_keys: int,
  rows: int,
) -> jax.Array:
  """The pairs, bool [A, 1, 1, R T, S]; a tile of keys has `num_keys`."""
  orders: Any = plan.queries, plan.keys
  q_at = _positions(orders[0].positions, queries_AC, plan.tile)
  k_at = _positions(orders[1].positions, keys_AC, num_keys)
  mask_ATS = online_softmax.pairs(plan.pattern, q_at, k_at)
  return jnp.tile(mask_ATS, (1, rows, 1))[:, None, None]


def _positions(positions: Table, tiles_AC: jax.Array, tile: int) -> jax.Array:
  """Positions [A, S], -1 where a tile is -1."""
  positions_NT = jnp.asarray(positions).reshape(-1, tile)
  is_tile = tiles_AC[..., None] >= 0
  positions_ACT = jnp.where(is_tile, positions_NT[tiles_AC.clip(0)], -1)
  return positions_ACT.reshape(len(tiles_AC), -1)
