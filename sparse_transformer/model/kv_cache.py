"""The key-value cache for decoding, derived from the patterns.

Sequences are drawn position by position. A key is kept in a slot from its own
position to that of the last query that attends to it; then the slot is free
for another key. A step reads only the keys in its row of the pattern. Both
follow from the pattern's `mask`: Local keeps the last keys; Block and Summary
keep the current block and the summaries; Strided keeps all keys and reads
every stride-th. A step gathers the slots of its row if they are few; otherwise
it reads all slots, and the mask says which of them count.

For content-based pairs, all keys and labels are kept: a step adds the labels of
its position, and the mask is that of the pattern bound to them. With learned
spans, a key is kept as long as the longest span reaches.

Axes are named as in the README, with S for slots and R for keys of a row.
"""

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.content import selection, spans as spans_lib
from sparse_transformer.model import transformer
from sparse_transformer.model.hyperparameters import Config
from sparse_transformer.patterns import Pattern, analysis
from sparse_transformer.patterns.catalogue import Causal

Cache = dict[int, list[tuple[jax.Array, ...]]]  # see `Decoder.init`
# (k_BHRK, v_BHRE, what is added to scores [B or 1, H or 1, R]) that a step
# reads: -inf for keys that are not in its row.
Row = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
  """Where the keys of one causal pattern are kept over n steps."""

  pattern: Pattern
  # int32 [n], the slot of each key; `size` for keys without a reader.
  slots: np.ndarray
  # int [n], the last query that may attend to each key, -1 for none.
  last: np.ndarray
  size: int  # number of slots
  width: int  # the largest number of keys of a query

  @property
  def is_narrow(self) -> bool:
    """Whether rows are known beforehand, and use few of the slots."""
    return 2 * self.width <= self.size and not self.pattern.contents()

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Slots of the keys of each query, then `size`: int32 [queries, width]."""
    queries = np.arange(start, stop, dtype=np.int32)
    # Keys from `stop` on have no reader here: the pattern is causal.
    keys = np.flatnonzero(self.last[:stop] >= start).astype(np.int32)
    row, col = np.nonzero(self.pattern.mask(queries[:, None], keys))
    first = np.searchsorted(row, np.arange(stop - start))
    rows = np.full((stop - start, self.width), self.size, np.int32)
    rows[row, np.arange(len(row)) - first[row]] = self.slots[keys[col]]
    return rows

  def reads(self, start: int, stop: int) -> np.ndarray:
    """The reads of steps: `rows` or, unless narrow, the keys in all slots."""
    if self.is_narrow:
      return self.rows(start, stop)
    held = np.tile(self.held(start), (stop - start, 1))
    for t in range(start, stop):
      held[t - start :, self.slots[t]] = t
    return held

  def held(self, stop: int) -> np.ndarray:
    """The key in each slot before step `stop`, -1 for none, [size + 1]."""
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, -1, np.int32)
    held[self.slots[keys]] = keys
    return held

  def take(
    self,
    kv: Sequence[jax.Array],
    labels: Sequence[jax.Array],
    index: jax.Array | int,
    t: jax.Array,
    read: jax.Array,
    directions: selection.Directions,
  ) -> Row:
    """Takes what step t reads in a layer of a stack, see `Decoder.init`."""
    if self.is_narrow:
      k, v = (jnp.moveaxis(x[index, :, :, read], 0, 2) for x in kv)
      return k, v, jnp.where(read < self.size, 0.0, -jnp.inf)[None, None]
    k, v = (x[index] for x in kv)
    pattern, bound = self.pattern, self.pattern.support()
    if labels:
      contents = zip(selection.labelled(pattern), labels, strict=True)
      sets = tuple(content.sets(x[index]) for content, x in contents)
      bound = pattern.bind(selection.unions(pattern, sets))
    k_at = read.reshape(1, 1, 1, -1)
    mask = bound.mask(jnp.reshape(t, (1, 1, 1, 1)), k_at) & (k_at >= 0)
    bias = jnp.where(mask, 0.0, -jnp.inf)[:, :, 0]
    heads = (pattern,) * k.shape[1]
    weights_HS = spans_lib.weights(heads, directions, t, read)
    if weights_HS is not None:
      bias = bias + jnp.log(weights_HS)[None]
    if 2 * self.width > self.size:
      return k, v, bias
    bias = jnp.broadcast_to(bias, k.shape[:3])
    bias, slots_BHR = lax.top_k(bias, self.width)
    k, v = (jnp.take_along_axis(x, slots_BHR[..., None], 2) for x in (k, v))
    return k, v, bias


@functools.lru_cache(maxsize=256)
def make_plan(pattern: Pattern, n: int) -> CachePlan:
  """Makes the plan with the fewest slots.

  >>> from sparse_transformer.patterns import Local
  >>> make_plan(Local(2), 5).slots.tolist()
  [0, 1, 0, 1, 0]

  Raises:
    ValueError: if the pattern is not causal.
  """
  kept = kept_pairs(pattern)
  if not analysis.is_causal(kept, n):
    raise ValueError(
      f"{pattern} lets queries see later keys, so it cannot be decoded step by"
      " step; use a causal pattern"
    )
  last = analysis.last_readers(kept, n)
  slots, size = _assign_slots(last)
  width = analysis.most_keys(pattern, n)
  return CachePlan(pattern, slots, last, size, width)


def _assign_slots(last: np.ndarray) -> tuple[np.ndarray, int]:
  """(slot of each key, number of slots); the last reader frees a slot."""
  slots, size = np.full(len(last), -1, np.int32), 0
  freed: list[tuple[int, int]] = []  # heap: (position, slot free from there on)
  for key in np.flatnonzero(last >= np.arange(len(last))).tolist():
    if freed and freed[0][0] <= key:
      slot = heapq.heappop(freed)[1]
    else:
      slot, size = size, size + 1
    slots[key] = slot
    heapq.heappush(freed, (int(last[key]) + 1, slot))
  slots[slots < 0] = size
  return slots, size


def kept_pairs(pattern: Pattern) -> Pattern:
  """The pairs for which keys are kept: labels may depend on any earlier key."""
  return Causal() if selection.labelled(pattern) else pattern.support()


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
  pattern: Pattern,
  labels: Sequence[jax.Array],
  index: jax.Array | int,
  start: jax.Array | int,
  q_BLHK: jax.Array,
  k_BHSK: jax.Array,
  directions: selection.Directions,
) -> list[jax.Array]:
  """The labels of layers, with those of one layer from position `start` on.

  The slots of that layer have the keys of all positions so far.
  """
  first, found = [jnp.int32(i) for i in (index, 0, 0, start, 0)], []
  for content, x in zip(selection.labelled(pattern), labels, strict=True):
    k_BMHK = k_BHSK[:, :, : x.shape[3]].swapaxes(1, 2)
    given = directions.get(content)
    new = selection.labels(content, q_BLHK, k_BMHK, given, start)
    found.append(lax.dynamic_update_slice(x, new[None], first))
  return found


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A `sampling.Decoder` that predicts position by position with a cache."""

  config: Config

  @functools.cached_property
  def plans(self) -> dict[Pattern, CachePlan]:
    """The plan of each distinct pattern of the network."""
    used = itertools.chain(*self.config.patterns)
    return {p: make_plan(p, self.config.length) for p in dict.fromkeys(used)}

  def tables(
    self, start: int, stop: int
  ) -> list[tuple[np.ndarray, np.ndarray]]:
    """(slots to write, what to read) for each of `plans`, by step."""
    return [
      (plan.slots[start:stop], plan.reads(start, stop))
      for plan in self.plans.values()
    ]

  def init(self, batch: int) -> Cache:
    """Makes the empty cache.

    Returns:
      {first layer of a stack: [(k, v, *labels) of each group of heads]}. k is
      [layers of the stack, B, heads of the group, S + 1, K]; the last slot
      takes the keys without a reader. Labels are int32, with [n, C] at the end.
    """
    config = self.config
    widths = [x // config.num_heads for x in (config.qk_width, config.width)]

    def cache(layers, pattern, heads):
      kept = layers, batch, len(heads)
      size = self.plans[pattern].size + 1
      nums = num_labels(pattern, config.length, widths[0])
      return (
        *(jnp.zeros((*kept, size, width), config.dtype) for width in widths),
        *(jnp.zeros((*kept, config.length, c), jnp.int32) for c in nums),
      )

    return {
      layer: [cache(count, *group) for group in self._groups(layer)]
      for layer, count in transformer.stacks(config).items()
    }

  def prefill(self, params: dict, tokens_BL: jax.Array) -> Cache:
    """Computes the cache after a prompt, all its positions at once."""
    batch, stop = tokens_BL.shape

    def attend(cache, layer, index, directions, q_BLHK, k_BLHK, v_BLHE):
      inputs = q_BLHK, k_BLHK, v_BLHE

      def fill(kept, pattern, heads):
        # Slots that hold no key get an arbitrary one: no row reads them.
        held = self.plans[pattern].held(stop)
        q, k, v = (x[:, :, heads] for x in inputs)
        k, v = (
          jnp.take(x, held, axis=1, mode="clip").swapaxes(1, 2) for x in (k, v)
        )
        kv = (x.at[index].set(y) for x, y in zip(kept[:2], (k, v), strict=True))
        given = _of_heads(directions, heads)
        return *kv, *add_labels(pattern, kept[2:], index, 0, q, k, given)

      groups = zip(cache[layer], self._groups(layer), strict=True)
      cache = cache | {layer: [fill(kept, *group) for kept, group in groups]}
      return model.attend(cache, layer, index, directions, *inputs)

    if not stop:
      return self.init(batch)
    model = transformer.bind(self.config, params)
    x_BLD = model.embed(tokens_BL)
    return model.run_blocks(x_BLD, attend, self.init(batch))[1]

  def step(
    self,
    params: dict,
    cache: Cache,
    tokens_B: jax.Array,
    t: jax.Array,
    table: list[tuple[jax.Array, jax.Array]],
  ) -> tuple[jax.Array, Cache]:
    """Predicts position t, see `sampling.Decoder`."""
    rows = dict(zip(self.plans, table, strict=True))

    def attend(cache, layer, index, directions, q_B1HK, k_B1HK, v_B1HE):
      outs, groups = [], []
      for kept, (pattern, heads) in zip(
        cache[layer], self._groups(layer), strict=True
      ):
        plan, (slot, read) = self.plans[pattern], rows[pattern]
        q, k, v = (x[:, :, heads] for x in (q_B1HK, k_B1HK, v_B1HE))
        kv = [
          x.at[index, :, :, slot].set(new[:, 0])
          for x, new in zip(kept[:2], (k, v), strict=True)
        ]
        given = _of_heads(directions, heads)
        k_BHSK = kv[0][index]
        labels = add_labels(pattern, kept[2:], index, t, q, k_BHSK, given)
        row = plan.take(kv, labels, index, t, read, given)
        outs.append(_attend_row(q[:, 0], *row))
        groups.append((*kv, *labels))
      # The outputs are sorted by group: restore the order of the heads.
      order = np.concatenate([heads for _, heads in self._groups(layer)])
      out_BHE = jnp.concatenate(outs, axis=1)[:, np.argsort(order)]
      return out_BHE[:, None], cache | {layer: groups}

    model = transformer.bind(self.config, params)
    x_B1D = model.embed_next(tokens_B, t)
    x_B1D, cache, _ = model.run_blocks(x_B1D, attend, cache)
    return model.unembed(x_B1D)[:, 0], cache

  def num_bytes(self, batch: int) -> int:
    """Size of the cache in bytes."""
    cache = jax.eval_shape(lambda: self.init(batch))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))

  def _groups(self, layer: int) -> list[tuple[Pattern, np.ndarray]]:
    """[(pattern, the heads that use it)]."""
    patterns = self.config.patterns[layer]
    return [
      (pattern, np.flatnonzero([other == pattern for other in patterns]))
      for pattern in dict.fromkeys(patterns)
    ]


def _of_heads(directions, heads):
  return {c: x if len(x) == 1 else x[heads] for c, x in directions.items()}


def _attend_row(q_BHK, k_BHRK, v_BHRE, bias_BHR):
  """Attention of one query per head to a `Row`: out_BHE, 0 without keys."""
  dtype = jnp.promote_types(q_BHK.dtype, jnp.float32)
  q_BHK = q_BHK.astype(dtype) / np.sqrt(q_BHK.shape[-1])
  s_BHR = jnp.einsum("bhk,bhrk->bhr", q_BHK, k_BHRK.astype(dtype)) + bias_BHR
  max_BH1 = s_BHR.max(-1, keepdims=True, initial=jnp.finfo(dtype).min)
  p_BHR = jnp.exp(s_BHR - max_BH1)
  sum_BH1 = p_BHR.sum(-1, keepdims=True)
  out_BHE = jnp.einsum("bhr,bhre->bhe", p_BHR, v_BHRE.astype(dtype))
  out_BHE = out_BHE / jnp.where(sum_BH1 == 0, 1, sum_BH1)
  return out_BHE.astype(k_BHRK.dtype)
