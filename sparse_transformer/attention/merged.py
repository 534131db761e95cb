"""Sparse attention tile by tile, in plain JAX, in linear memory.

Each part of a pattern runs in its own orders of positions. There its pairs
fill whole tiles, and only the tiles that hold pairs are computed, by one of
two schedules: `sequential`, for the caches of a CPU, or `parallel`, for
accelerators. Parts are merged by log-sum-exp. One backward pass stands over
all parts: it recomputes the weights of each against the merged log-sum-exp,
so nothing of size n x keys is ever stored.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer.attention import (
  batched as parallel,
  streamed as sequential,
)

SCHEDULES = {"sequential": sequential, "parallel": parallel}
SAVED = "attention_out", "attention_lse"  # names for rematerialisation


def attend(q_BLHK, k_BLHK, v_BLHE, patterns, tile=0, schedule=None):
  """`attention.attend`, with a tuple of one pattern per head.

  schedule: "sequential" or "parallel"; by default the first on CPUs, the
    second elsewhere.

  Returns (out_BLHE, lse_BLH).
  """
  if schedule is None:
    on_cpu = jax.default_backend() == "cpu"
    schedule = "sequential" if on_cpu else "parallel"
  return _attend(q_BLHK, k_BLHK, v_BLHE, patterns, tile, schedule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _attend(q_BLHK, k_BLHK, v_BLHE, patterns, tile, schedule):
  return _forward(q_BLHK, k_BLHK, v_BLHE, patterns, tile, schedule)[0]


def _forward(q_BLHK, k_BLHK, v_BLHE, patterns, tile, schedule):
  dtype = jnp.promote_types(q_BLHK.dtype, jnp.float32)
  n, schedule = q_BLHK.shape[1], SCHEDULES[schedule]
  out_BLHE = jnp.zeros(v_BLHE.shape, dtype)
  lse_BLH = jnp.full(v_BLHE.shape[:3], -jnp.inf, dtype)
  for i, (part, heads) in enumerate(_parts(patterns, n)):
    plan = schedule.plan(part, n, tile)
    queries, keys = plan.query_positions, plan.key_positions
    if i:
      q_BLHK, out_BLHE, lse_BLH = _in_turn(q_BLHK, out_BLHE, lse_BLH)
    new = schedule.forward(
      plan,
      _arrange(q_BLHK[:, :, heads], queries),
      _arrange(k_BLHK[:, :, heads], keys),
      _arrange(v_BLHE[:, :, heads], keys),
    )
    new = tuple(_restore(x, queries, n) for x in new)
    old = out_BLHE[:, :, heads], lse_BLH[:, :, heads]
    out, lse = new if i == 0 else merge(old, new)
    out_BLHE = out_BLHE.at[:, :, heads].set(out)
    lse_BLH = lse_BLH.at[:, :, heads].set(lse)
  out_BLHE = checkpoint_name(out_BLHE.astype(v_BLHE.dtype), SAVED[0])
  lse_BLH = checkpoint_name(lse_BLH, SAVED[1])
  return (out_BLHE, lse_BLH), (q_BLHK, k_BLHK, v_BLHE, out_BLHE, lse_BLH)


def _backward(patterns, tile, schedule, saved, cotangents):
  q_BLHK, k_BLHK, v_BLHE, out_BLHE, lse_BLH = saved
  dout_BLHE, dlse_BLH = cotangents
  n, schedule = q_BLHK.shape[1], SCHEDULES[schedule]
  # With p the merged weights: ds = p (dout v^T - delta), and lse adds p dlse.
  delta_BLH = (out_BLHE.astype(lse_BLH.dtype) * dout_BLHE).sum(-1)
  # A row without keys has no weights; 0 keeps its exp(-inf - lse) at 0.
  lse_BLH = jnp.where(jnp.isfinite(lse_BLH), lse_BLH, 0)
  of_queries = q_BLHK, dout_BLHE, lse_BLH, delta_BLH - dlse_BLH
  grads = [jnp.zeros(x.shape, lse_BLH.dtype) for x in (q_BLHK, k_BLHK, v_BLHE)]
  for i, (part, heads) in enumerate(_parts(patterns, n)):
    plan = schedule.plan(part, n, tile)
    queries, keys = plan.query_positions, plan.key_positions
    if i:
      of_queries, grads = _in_turn(of_queries, grads)
    new = schedule.backward(
      plan,
      *(_arrange(x[:, :, heads], queries) for x in of_queries),
      *(_arrange(x[:, :, heads], keys) for x in (k_BLHK, v_BLHE)),
    )
    for j, positions in enumerate((queries, keys, keys)):
      grad = _restore(new[j], positions, n)
      grads[j] = grads[j].at[:, :, heads].add(grad)
  return tuple(g.astype(x.dtype) for g, x in zip(grads, saved[:3], strict=True))


_attend.defvjp(_forward, _backward)


def merge(first, second):
  """(out_BLHE, lse_BLH) over the keys of both, from those over each.

  Exact, as long as no pair is counted in both. Two rows without keys give
  one without keys.
  """
  (out_1, lse_1), (out_2, lse_2) = first, second
  lse = jnp.logaddexp(lse_1, lse_2)
  shift = jnp.where(jnp.isfinite(lse), lse, 0)
  weight_1, weight_2 = jnp.exp(lse_1 - shift), jnp.exp(lse_2 - shift)
  return weight_1[..., None] * out_1 + weight_2[..., None] * out_2, lse


def _in_turn(*arrays):
  """The same arrays; what follows of one waits for what comes before in all.

  Else parts run side by side, where each leaves the other no cache.
  """
  return lax.optimization_barrier(arrays)


@functools.lru_cache(maxsize=256)
def _parts(patterns, n):
  """Each distinct part that has pairs, with the heads that use it.

  Heads come as a slice where they can, so that taking them copies nothing.
  """
  heads = {}
  for head, pattern in enumerate(patterns):
    for part in pattern.parts():
      heads.setdefault(part, []).append(head)
  everyone = list(range(len(patterns)))
  return tuple(
    (part, slice(None) if h == everyone else np.array(h))
    for part, h in heads.items()
    if part.pairs(n)
  )


def _arrange(x_BL, positions):
  """x in the order of `positions`; anything finite at padded places."""
  if np.array_equal(positions, np.arange(x_BL.shape[1])):
    return x_BL
  return jnp.take(x_BL, np.maximum(positions, 0), axis=1)


def _restore(x_BL, positions, n):
  """Undoes `_arrange`: natural order, 0 where `positions` has no place."""
  if np.array_equal(positions, np.arange(n)):
    return x_BL
  inverse = np.full(n, len(positions))
  real = positions >= 0
  inverse[positions[real]] = np.flatnonzero(real)
  return jnp.take(x_BL, inverse, axis=1, mode="fill", fill_value=0)
