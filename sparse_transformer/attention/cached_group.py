"""The heads of a cache with one pattern: what is kept, and attention of a step.

A key keeps a slot from its own position until the last query that attends to
it. For content-based pairs, all keys and labels are kept.

Axes: C key heads of a group, each with R of its query heads; S slots and one
more, which takes keys that nothing reads.
"""

import dataclasses
import functools
import heapq
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract, online_softmax
from sparse_transformer.attention.content import binding, spans as spans_lib
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal
from sparse_transformer.patterns.content import Known


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
  """The slots of keys of a causal pattern over n steps, as few as can be."""

  # int32 [n], the slot of each key; `size` for keys without a reader.
  slots: np.ndarray
  # int [n], the last query that may attend to each key, -1 for none.
  last: np.ndarray
  size: int  # number of slots
  most_keys: int  # of a query

  def held(self, stop: int) -> np.ndarray:
    """The key in each slot before step `stop`, -1 for none, [size + 1]."""
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, -1, np.int32)
    held[self.slots[keys]] = keys
    return held


@functools.lru_cache(maxsize=256)
def plan_cache(pattern: Pattern, n: int) -> CachePlan:
  """The plan of a pattern; a ValueError if it is not causal.

  >>> from sparse_transformer.patterns import Local
  >>> plan_cache(Local(2), 5).slots.tolist()
  [0, 1, 0, 1, 0]
  """
  kept = kept_pairs(pattern)
  if not analysis.is_causal(pattern, n):
    raise ValueError(
      f"{pattern} lets queries see later keys, so it cannot be decoded step by"
      " step; use a causal pattern"
    )
  last = analysis.last_readers(kept, n)
  slots, size = np.full(n, -1, np.int32), 0
  freed: list[tuple[int, int]] = []  # heap: (position, slot free from there on)
  for key in np.flatnonzero(last >= np.arange(n)).tolist():
    if freed and freed[0][0] <= key:
      slot = heapq.heappop(freed)[1]
    else:
      slot, size = size, size + 1
    slots[key] = slot
    heapq.heappush(freed, (int(last[key]) + 1, slot))
  slots[slots < 0] = size
  return CachePlan(slots, last, size, analysis.most_keys(pattern, n))


def kept_pairs(pattern: Pattern) -> Pattern:
  """The pairs for which keys are kept: labels may depend on any earlier key."""
  return Causal() if binding.labelled(pattern) else pattern.support()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Group:
  """The keys and labels of some heads."""

  k: jax.Array  # [layers, B, C, S + 1, K]
  v: jax.Array  # [layers, B, C, S + 1, E]
  positions: jax.Array  # int32 [S + 1], of the key in each slot, -1 for none
  labels: tuple[jax.Array, ...]  # int32 [layers, B, C R, n, labels]
  pattern: Pattern = dataclasses.field(metadata=contract.STATIC)
  heads: tuple[int, ...] = dataclasses.field(metadata=contract.STATIC)  # C R
  key_heads: tuple[int, ...] = dataclasses.field(metadata=contract.STATIC)  # C
  length: int = dataclasses.field(metadata=contract.STATIC)  # positions, n

  @property
  def plan(self) -> CachePlan:
    return plan_cache(self.pattern, self.length)

  def write(
    self,
    place: tuple[Any, Any],
    slots: Any,
    positions: Any,
    arrays: Sequence[Any],
    directions: Mapping[Pattern, jax.Array],
  ) -> "Group":
    """The group with the keys of `positions` in `slots`, integers or arrays.

    The place is the layer and first position of q, k and v [B, L, heads, ...].
    """
    layer, start = place
    q_BLHK, *new = arrays

    def put(x, new_BLGK):
      new_LBCK = jnp.moveaxis(new_BLGK[:, :, np.array(self.key_heads)], 1, 0)
      # A slot that holds no key gets an arbitrary one.
      rows = jnp.take(new_LBCK, positions - start, axis=0, mode="clip")
      return x.at[layer, :, :, slots].set(rows.astype(x.dtype))

    k, v = map(put, (self.k, self.v), new)
    labels, first = [], [jnp.int32(i) for i in (layer, 0, 0, start, 0)]
    contents = binding.labelled(self.pattern)
    for content, x in zip(contents, self.labels, strict=True):
      k_BMCK = k[layer][:, :, : self.length].swapaxes(1, 2)
      q, given = q_BLHK[:, :, np.array(self.heads)], self._own(directions)
      found = binding.labels(content, q, k_BMCK, given.get(content), start)
      labels.append(lax.dynamic_update_slice(x, found[None], first))
    held = self.positions.at[slots].set(positions)
    return dataclasses.replace(
      self, k=k, v=v, positions=held, labels=tuple(labels)
    )

  def attend(
    self,
    place: tuple[Any, Any],
    q_BHK: jax.Array,
    directions: Mapping[Pattern, jax.Array],
    scores: contract.Scores,
  ) -> online_softmax.Softmax:
    """(out [B, C R, E], lse [B, C R]) of queries whose keys are written."""
    layer, t = place
    q_BHK = q_BHK[:, np.array(self.heads)]
    batch, num_heads, width = q_BHK.shape
    dtype = np.promote_types(q_BHK.dtype, np.float32)
    weights = self._weights(layer, t, self._own(directions), dtype)
    k, v = self.k[layer], self.v[layer]
    num_keys = max(1, self.plan.most_keys)  # a maximum needs one
    if weights.shape[:2] == (1, 1) and 2 * num_keys <= self.plan.size:
      weights, slots = lax.top_k(weights, num_keys)
      few = (x[layer, :, :, slots[0, 0]] for x in (self.k, self.v))
      k, v = (jnp.moveaxis(x, 0, 2) for x in few)
    shape = k.shape[1], num_heads // k.shape[1]  # C, R
    of_weights = shape if weights.shape[1] > 1 else (1, 1)
    weights = weights.reshape(1, len(weights), *of_weights, -1)
    q = q_BHK.astype(dtype).reshape(1, batch, *shape, width)
    has_span = spans_lib.span_of(self.pattern) is not None
    out, lse = online_softmax.softmax(
      q,
      contract.Keys(k[None].astype(dtype), v[None].astype(dtype)),
      (weights > 0, weights if has_span else None),
      scores,
    )
    return out.reshape(batch, num_heads, -1), lse.reshape(batch, num_heads)

  def _own(self, directions):
    return {
      content: x if len(x) == 1 else jnp.asarray(x)[np.array(self.heads)]
      for content, x in directions.items()
    }

  def _weights(self, layer, t, directions, dtype):
    """The weights of keys at step t, [B or 1, C R or 1, S + 1]; 0 for none."""
    pattern, bound = self.pattern, self.pattern.support()
    if self.labels:
      contents = zip(binding.labelled(pattern), self.labels, strict=True)
      sets = tuple(content.sets(x[layer]) for content, x in contents)
      bound = pattern.bind(binding.unions(pattern, sets))
    k_at = self.positions
    keys = k_at.reshape(1, 1, 1, -1)
    mask = (bound.mask(t.reshape(1, 1, 1, 1), keys) & (keys >= 0))[:, :, 0]
    heads = (pattern,) * len(self.heads)
    ramps_HS = spans_lib.weights(heads, directions, t, k_at, dtype)
    weights = jnp.ones((1, 1, 1), dtype) if ramps_HS is None else ramps_HS[None]
    # Otherwise they are computed for each use.
    return lax.optimization_barrier(jnp.where(mask, weights, 0))


def num_labels(pattern: Pattern, n: int, width: int) -> list[int]:
  """The number of labels of a position, for each of `labelled`; width is K."""

  def of(content):
    shapes = (1, 1, 1, width), (1, n, 1, width)
    directions = 1, content.num_directions, width
    q, k, d = (
      jax.ShapeDtypeStruct(x, jnp.float32) for x in (*shapes, directions)
    )
    return jax.eval_shape(content.labels, Known(q, k, d)).shape[-1]

  return [of(content) for content in binding.labelled(pattern)]
