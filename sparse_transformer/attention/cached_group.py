"""One group of a cache: its labels, and attention of a query on its slots.

A step finds the keys of its query among the positions that the slots hold by
the pattern's `mask`. If they are few, it gathers their slots; otherwise it
reads all slots. For content-based pairs, all keys and labels are kept: a step
adds the labels of its position, and the mask is that of the pattern bound to
them. With learned spans, a key is kept as long as the longest span reaches.

Axes: C key heads of a group, each with R of its query heads, or C R heads each
with one; S slots and one more, which takes the keys without a reader.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.cache_plan import CachePlan
from sparse_transformer.attention.content import selection, spans as spans_lib
from sparse_transformer.attention.contract import Scores
from sparse_transformer.patterns import Pattern


class Kept(NamedTuple):
  """What is kept for a group."""

  k: jax.Array  # [layers, B, C, S + 1, K]
  v: jax.Array  # [layers, B, C, S + 1, E]
  positions: jax.Array  # int32 [S + 1], of the key in each slot, -1 for none
  labels: tuple[jax.Array, ...]  # int32 [layers, B, C R, n, labels]


def num_labels(pattern: Pattern, n: int, width: int) -> list[int]:
  """The labels of one of n positions, by `labelled`; width is K."""

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def of(content):
    directions = array(1, content.num_directions, width)
    q, k = array(1, 1, 1, width), array(1, n, 1, width)
    return jax.eval_shape(content.labels, q, k, directions).shape[-1]

  return [of(content) for content in selection.labelled(pattern)]


def add_labels(
  kept: Kept,
  pattern: Pattern,
  layer: jax.Array | int,
  start: jax.Array | int,
  q_BLHK: jax.Array,
  directions: Mapping[Pattern, jax.Array],
) -> Kept:
  """A group, with the labels of one layer from position `start` on.

  The slots of that layer have the keys of all positions so far.
  """
  first, found = [jnp.int32(i) for i in (layer, 0, 0, start, 0)], []
  contents = selection.labelled(pattern)
  for content, x in zip(contents, kept.labels, strict=True):
    k_BMCK = kept.k[layer][:, :, : x.shape[3]].swapaxes(1, 2)
    given = directions.get(content)
    new = selection.labels(content, q_BLHK, k_BMCK, given, start)
    found.append(lax.dynamic_update_slice(x, new[None], first))
  return kept._replace(labels=tuple(found))


def _bias(plan, kept, layer, t, num_heads, directions, dtype):
  """What step t adds to scores: [B or 1, C R or 1, S], -inf for no pair."""
  pattern, bound = plan.pattern, plan.pattern.support()
  if kept.labels:
    contents = zip(selection.labelled(pattern), kept.labels, strict=True)
    sets = tuple(content.sets(x[layer]) for content, x in contents)
    bound = pattern.bind(selection.unions(pattern, sets))
  k_at = kept.positions
  mask = bound.mask(t.reshape(1, 1, 1, 1), k_at.reshape(1, 1, 1, -1))
  mask &= (k_at >= 0).reshape(1, 1, 1, -1)
  bias = jnp.where(mask, 0.0, jnp.asarray(-jnp.inf, dtype))[:, :, 0]
  heads = (pattern,) * num_heads
  weights_HS = spans_lib.weights(heads, directions, t, k_at, dtype)
  if weights_HS is not None:
    bias = bias + jnp.log(weights_HS)[None]
  return lax.optimization_barrier(bias)  # else it is computed for each use


def _keys_and_bias(plan, kept, layer, shape, bias):
  """Keys, values and bias, of few slots if few have keys of the query."""
  if 2 * plan.width > plan.size:
    return kept.k[layer], kept.v[layer], bias
  bias, slots = lax.top_k(bias, plan.width)
  if bias.shape[:2] == (1, 1):
    at = slots[0, 0]
    k, v = (jnp.moveaxis(x[layer, :, :, at], 0, 2) for x in kept[:2])
    return k, v, bias
  # Each query head has its own keys.
  b, c, r = shape
  heads = np.arange(c).repeat(r)[None, :, None]
  own = layer, np.arange(b)[:, None, None], heads, slots
  k, v = (x.at[own].get(mode="promise_in_bounds") for x in kept[:2])
  return k, v, bias


def attend_group(
  kept: Kept,
  plan: CachePlan,
  place: tuple[Any, jax.Array],
  q_BCRK: jax.Array,
  directions: Mapping[Pattern, jax.Array],
  scores: Scores,
  sinks_CR: jax.Array | None,
) -> jax.Array:
  """Attention of one query per head, [B, C R, E]; 0 without keys.

  `place` is its (layer, position), which the slots already have.
  """
  *lanes, width = b, c, r, _ = q_BCRK.shape
  dtype = jnp.promote_types(q_BCRK.dtype, jnp.float32)
  bias = _bias(plan, kept, *place, c * r, directions, dtype)
  k, v, bias = _keys_and_bias(plan, kept, place[0], lanes, bias)
  shape = k.shape[1], c * r // k.shape[1]  # C and R, or C R and 1
  of_bias = shape if bias.shape[1] > 1 else (1, 1)
  bias = bias.reshape(len(bias), *of_bias, -1)
  q = q_BCRK.reshape(b, *shape, width).astype(dtype) * scores.factor(width)
  s_BCRS = jnp.einsum("bcrk,bcsk->bcrs", q, k.astype(dtype))
  if scores.softcap:
    s_BCRS = scores.softcap * jnp.tanh(s_BCRS / scores.softcap)
  s_BCRS = s_BCRS + bias
  max_BCR1 = s_BCRS.max(-1, keepdims=True, initial=jnp.finfo(dtype).min)
  sum_of_sinks: Any = 0.0
  if sinks_CR is not None:
    sinks = sinks_CR.reshape(1, *shape, 1).astype(dtype)
    max_BCR1 = jnp.maximum(max_BCR1, sinks)
    sum_of_sinks = jnp.exp(sinks - max_BCR1)
  p_BCRS = jnp.exp(s_BCRS - max_BCR1)
  sum_BCR1 = p_BCRS.sum(-1, keepdims=True) + sum_of_sinks
  out_BCRE = jnp.einsum("bcrs,bcse->bcre", p_BCRS, v.astype(dtype))
  out_BCRE = out_BCRE / jnp.where(sum_BCR1 == 0, 1, sum_BCR1)
  return out_BCRE.reshape(b, c * r, -1)
