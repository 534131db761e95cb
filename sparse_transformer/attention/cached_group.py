"""The cache of heads with one pattern, and attention in a decoding step.

A key occupies a slot from its own position until the last query that attends to
it. For content-based patterns, all keys and buckets are kept.

Axes: C KV heads of a group, each with R of its query heads; S slots. Arrays
  have S + 1 slots: keys that no query reads are written to the last one.
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
from sparse_transformer.attention.content import binding
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal
from sparse_transformer.patterns.content import Content, Known


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
  """The slot of each key of a causal pattern, for the fewest slots.

  This is like register allocation: a slot is a register, and a key is a value
  that is live until its last reader. A new key reuses the slot that became free
  first. The number of slots is then only the largest number of keys that are
  live at the same time.
  """

  # int32 [n], the slot of each key; `size` for keys without a reader.
  slots: np.ndarray
  # int [n], the last query that may attend to each key, -1 for none.
  last: np.ndarray
  size: int  # number of slots
  most_keys: int  # the largest number of keys of a query

  def held(self, stop: int) -> np.ndarray:
    """Returns the key in each slot before step `stop`, int32 [size + 1].

    Empty slots are -1.
    """
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, -1, np.int32)
    held[self.slots[keys]] = keys
    return held


@functools.lru_cache(maxsize=256)
def plan_cache(pattern: Pattern, n: int) -> CachePlan:
  """Plans the slots of a pattern. Raises ValueError if it is not causal.

  >>> from sparse_transformer.patterns import Local
  >>> plan_cache(Local(2), 5).slots.tolist()
  [0, 1, 0, 1, 0]
  """
  if not analysis.is_causal(pattern, n):
    raise ValueError(
      f"{pattern} lets queries see later keys, so it cannot be decoded step by"
      " step; use a causal pattern"
    )
  # Buckets may depend on any earlier key, so content-based patterns keep all.
  kept = Causal() if pattern.contents() else pattern
  last = analysis.last_readers(kept, n)

  # A slot becomes free after the last reader of its key.
  slots = np.full(n, -1, np.int32)
  size = 0
  # heap: (first position at which it is free, slot)
  freed: list[tuple[int, int]] = []
  for key in np.flatnonzero(last >= np.arange(n)).tolist():
    if freed and freed[0][0] <= key:
      _, slot = heapq.heappop(freed)
    else:
      slot = size
      size += 1
    slots[key] = slot
    heapq.heappush(freed, (int(last[key]) + 1, slot))

  # One more slot receives the keys without a reader, since every key is
  # written.
  slots[slots < 0] = size
  return CachePlan(
    slots=slots,
    last=last,
    size=size,
    most_keys=analysis.most_keys(pattern, n),
  )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Group:
  """The keys and buckets of some heads."""

  k: jax.Array  # [layers, B, C, S + 1, K]
  v: jax.Array  # [layers, B, C, S + 1, E]
  # int32 [S + 1], the position of the key in each slot, -1 for none
  positions: jax.Array
  buckets: tuple[jax.Array, ...]  # int32 [layers, B, C R, n, buckets]
  pattern: Pattern = dataclasses.field(metadata=contract.STATIC)
  heads: tuple[int, ...] = dataclasses.field(metadata=contract.STATIC)  # C R
  key_heads: tuple[int, ...] = dataclasses.field(metadata=contract.STATIC)  # C
  length: int = dataclasses.field(metadata=contract.STATIC)  # positions, n

  @property
  def plan(self) -> CachePlan:
    return plan_cache(self.pattern, self.length)

  def write(
    self,
    layer: Any,
    start: Any,
    arrays: Sequence[Any],
    slots: Any,
    positions: Any,
    directions: Mapping[Pattern, jax.Array],
  ) -> "Group":
    """Returns the group, with more keys of one layer written to it.

    Args:
      layer: the layer.
      start: the first position of the arrays.
      arrays: q, k and v, [B, L, heads, ...]; q may be None if there are no
        buckets.
      slots: the slots that are written, an integer or int32 [slots].
      positions: the position whose key is written to each slot; -1 writes an
        arbitrary key.
      directions: as in `attend`.
    """
    q_BLHK, k_BLGK, v_BLGE = arrays
    key_heads = np.array(self.key_heads)

    # The axis of slots comes first, because an index array between slices moves
    # its axis to the front.
    def put(x, new_BLGK):
      new_LBCK = jnp.moveaxis(new_BLGK[:, :, key_heads], 1, 0)
      rows = jnp.take(new_LBCK, positions - start, axis=0, mode="clip")
      return x.at[layer, :, :, slots].set(rows.astype(x.dtype))

    k = put(self.k, k_BLGK)
    v = put(self.v, v_BLGE)

    # Buckets are found once, when a position is written. This may use all
    # earlier keys: if a pattern has buckets, each key has a slot of its own, in
    # the order of positions.
    buckets = []
    own_directions = self._own(directions)
    for content, earlier in zip(
      self.pattern.contents(), self.buckets, strict=True
    ):
      new = binding.find_buckets(
        content,
        q_BLHK[:, :, np.array(self.heads)],
        k[layer][:, :, : self.length].swapaxes(1, 2),
        own_directions.get(content),
        start,
      )
      place = [jnp.int32(i) for i in (layer, 0, 0, start, 0)]
      buckets.append(lax.dynamic_update_slice(earlier, new[None], place))
    return dataclasses.replace(
      self,
      k=k,
      v=v,
      positions=self.positions.at[slots].set(positions),
      buckets=tuple(buckets),
    )

  def attend(
    self,
    layer: Any,
    t: jax.Array,
    q_BHK: jax.Array,
    directions: Mapping[Pattern, jax.Array],
    scores: contract.Scores,
    bias_HD: jax.Array | None = None,
  ) -> online_softmax.Softmax:
    """Computes attention for one query per head, at position t.

    The keys of position t must have been written.

    Args:
      layer: the layer.
      t: the position, int32.
      q_BHK: the queries of all heads.
      directions: as in `attend`.
      scores: how scores are computed from products.
      bias_HD: the bias of all heads, or None.

    Returns:
      (out [B, C R, E], lse [B, C R]), in float32 or wider.
    """
    q_BHK = q_BHK[:, np.array(self.heads)]
    batch, num_heads, width = q_BHK.shape
    dtype = np.promote_types(q_BHK.dtype, np.float32)

    # The mask excludes keys that remain in a slot after their last reader.
    mask = self._mask(layer, t)
    k = self.k[layer]
    v = self.v[layer]
    k_at = self.positions

    # If few slots contain keys of the query, only those slots are read.
    # at least one, for the maximum of scores
    num_keys = max(1, self.plan.most_keys)
    is_same_for_all = mask.shape[:2] == (1, 1)
    if is_same_for_all and 2 * num_keys <= self.plan.size:
      mask, slots = lax.top_k(mask, num_keys)
      slots = slots[0, 0]
      k_at = k_at[slots]
      k = jnp.moveaxis(self.k[layer, :, :, slots], 0, 2)
      v = jnp.moveaxis(self.v[layer, :, :, slots], 0, 2)

    num_key_heads = k.shape[1]
    group = num_heads // num_key_heads
    own_group = group if mask.shape[1] > 1 else 1
    mask = mask.reshape(1, len(mask), -1, own_group, mask.shape[2])
    bias = None
    if bias_HD is not None:
      own_HD = bias_HD[np.array(self.heads)]
      bias = contract.bias_at(own_HD, t - k_at)
      bias = bias.reshape(1, 1, num_key_heads, group, -1)
    q = q_BHK.astype(dtype)
    out, lse = online_softmax.softmax(
      q.reshape(1, batch, num_key_heads, group, width),
      contract.Keys(k[None].astype(dtype), v[None].astype(dtype)),
      mask,
      scores,
      bias,
    )
    out = out.reshape(batch, num_heads, -1)
    lse = lse.reshape(batch, num_heads)
    return out, lse

  def _own(self, directions):
    """Returns the directions of the heads in this group."""
    heads = np.array(self.heads)
    return {
      content: x if np.shape(x)[-3] == 1 else jnp.asarray(x)[..., heads, :, :]
      for content, x in directions.items()
    }

  def _mask(self, layer, t):
    """Returns a mask of the slots with keys that the query at t attends to.

    The result is bool [B or 1, C R or 1, S + 1].
    """
    bound = self.pattern
    if self.buckets:
      contents = self.pattern.contents()
      sets = [
        content.sets(x[layer])
        for content, x in zip(contents, self.buckets, strict=True)
      ]
      bound = self.pattern.bind(binding.unions(self.pattern, sets))

    # The mask of a bound pattern takes positions with axes of batch and heads.
    query = t.reshape(1, 1, 1, 1)
    keys = self.positions.reshape(1, 1, 1, -1)
    mask = (bound.mask(query, keys) & (keys >= 0))[:, :, 0]

    # Without this barrier, the compiler would compute the mask again for each
    # use.
    return lax.optimization_barrier(mask)


def num_buckets(content: Content, n: int, width: int) -> int:
  """Returns the number of buckets of a position; `width` is K."""
  shape = content.given_shape(1, 1, 1, width)

  # This uses only shapes, and computes nothing.
  arrays = jax.eval_shape(
    lambda: Known(
      jnp.zeros((1, 1, 1, width)),
      jnp.zeros((1, n, 1, width)),
      jnp.zeros(shape),
    )
  )
  return jax.eval_shape(content.find_buckets, arrays).shape[-1]
