"""The key-value cache for decoding, derived from the patterns.

Sequences are drawn position by position. A key is kept in a slot from its own
position to that of the last query that attends to it; then the slot is free
for another key. A step reads only the keys of its own row of the pattern. Both
follow from the pattern's `mask`: Local keeps the last keys; Block and Summary
keep the current block and the summaries; Strided keeps all keys and reads
every stride-th. Where pairs follow the content, a key is kept for as long as a
query might attend to it, and `content_cache` finds the keys of a step.

Axes are named as in the README, with S for slots and R for keys of a row.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.model import content_cache, transformer
from sparse_transformer.model.config import Config
from sparse_transformer.patterns import Pattern, analysis

# {first layer of a stack: [arrays of each group of heads]}, see `Decoder.init`.
Cache = dict[int, list[tuple[jax.Array, ...]]]
# For each pattern (slots, reads), see `Decoder.tables`.
Tables = list[tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
  """Where the keys of one causal pattern are kept over n steps.

  Args:
    pattern: the pattern.
    slots: int32 [n], the slot of each key; `size` for keys without a reader.
    last: int [n], the last query that may attend to each key, -1 for none.
    size: number of slots.
    width: the largest number of keys of a query.
  """

  pattern: Pattern
  slots: np.ndarray
  last: np.ndarray
  size: int
  width: int

  @property
  def is_wide(self) -> bool:
    """Whether a row may use most slots.

    If so, a step reads all slots at once, which is faster than gathering many.
    """
    return 2 * self.width > self.size

  def rows(self, start: int, stop: int) -> np.ndarray:
    """Slots of the keys of queries start to stop - 1.

    Returns:
      int32 [stop - start, width], filled with `size` after a row's last key.
    """
    queries = np.arange(start, stop, dtype=np.int32)
    # Keys from `stop` on have no reader here: the pattern is causal.
    keys = np.flatnonzero(self.last[:stop] >= start).astype(np.int32)
    row, col = np.nonzero(self.pattern.mask(queries[:, None], keys))
    first = np.searchsorted(row, np.arange(stop - start))
    rows = np.full((stop - start, self.width), self.size, np.int32)
    rows[row, np.arange(len(row)) - first[row]] = self.slots[keys[col]]
    return rows

  def reads(self, start: int, stop: int) -> np.ndarray:
    """What steps read: `rows` or, if wide, bool [stop - start, size + 1].

    Nothing for a pattern that follows the content: the labels say what.
    """
    if self.pattern.contents():
      return np.zeros((stop - start, 0), bool)
    rows = self.rows(start, stop)
    if not self.is_wide:
      return rows
    read = np.zeros((stop - start, self.size + 1), bool)
    np.put_along_axis(read, rows, True, axis=1)
    read[:, self.size] = False
    return read

  def held(self, stop: int) -> np.ndarray:
    """The key in each slot before step `stop`: int32 [size + 1].

    `stop` where a slot holds no key.
    """
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, stop, np.int32)
    held[self.slots[keys]] = keys
    return held

  def take(
    self,
    slots: tuple[jax.Array, jax.Array],
    index: jax.Array | int,
    read: jax.Array,
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes what one step reads from the slots of one layer.

    Args:
      slots: keys and values of a stack of layers, see `Decoder.init`.
      index: the layer in the stack.
      read: a row of `reads`.

    Returns:
      (k_BHRK, v_BHRE, what is added to scores [1, 1, R]: 0 for the keys of
      the row, -inf for others).
    """
    if self.is_wide:
      real = read
      k, v = (x[index] for x in slots)
    else:
      real = read < self.size
      k, v = (jnp.moveaxis(x[index, :, :, read], 0, 2) for x in slots)
    return k, v, jnp.where(real, 0.0, -jnp.inf)[None, None]


@functools.lru_cache(maxsize=256)
def make_plan(pattern: Pattern, n: int) -> CachePlan:
  """Makes the plan with the fewest slots.

  >>> from sparse_transformer.patterns import Local
  >>> make_plan(Local(2), 5).slots.tolist()
  [0, 1, 0, 1, 0]

  Raises:
    ValueError: if the pattern is not causal.
  """
  kept = content_cache.kept(pattern)
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
  n = len(last)
  slots = np.full(n, -1, np.int32)
  free: list[int] = []
  # {position: slots that are free from there on}
  freed: dict[int, list[int]] = collections.defaultdict(list)
  size = 0
  for key in range(n):
    free += freed.pop(key, ())
    if last[key] < key:
      continue
    if not free:
      free.append(size)
      size += 1
    slots[key] = free.pop()
    freed[last[key] + 1].append(slots[key])
  slots[slots < 0] = size
  return slots, size


@dataclasses.dataclass(frozen=True)
class Decoder:
  """A `sampling.Decoder` that predicts position by position with a cache."""

  config: Config

  @functools.cached_property
  def plans(self) -> dict[Pattern, CachePlan]:
    """The plan of each distinct pattern of the network."""
    layers = self.config.patterns
    distinct = dict.fromkeys(p for heads in layers for p in heads)
    return {p: make_plan(p, self.config.length) for p in distinct}

  def tables(self, start: int, stop: int) -> Tables:
    """Where the steps at positions start to stop - 1 write and read.

    Returns:
      (slots to write, what to read) for each of `plans`, with a row per step.
    """
    return [
      (plan.slots[start:stop], plan.reads(start, stop))
      for plan in self.plans.values()
    ]

  def init(self, batch: int) -> Cache:
    """Makes the empty cache.

    Returns:
      {first layer of a stack: [(k, v, ...) of each group of heads]}, see
      `transformer.stacks`. k is [layers of the stack, B, heads of the group,
      S + 1, K]; the last slot takes the keys without a reader. Others are the
      states of `content_cache`, if the pattern follows the content.
    """
    config = self.config
    widths = config.qk_width, config.width

    def cache(layers, pattern, heads):
      size = self.plans[pattern].size + 1
      kept = layers, batch, len(heads)
      k, v = (
        jnp.zeros((*kept, size, width // config.num_heads), config.dtype)
        for width in widths
      )
      states = content_cache.init(
        pattern, config.length, kept, size, k.shape[-1]
      )
      return k, v, *states

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
        slots = (jnp.take(x, held, axis=1, mode="clip") for x in (k, v))
        new = (
          x.at[index].set(x_BSH.swapaxes(1, 2))
          for x, x_BSH in zip(kept[:2], slots, strict=True)
        )
        given = content_cache.take_heads(directions, heads)
        states = content_cache.fill(
          pattern, list(kept[2:]), index, held, q, k, given
        )
        return *new, *states

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
    """Predicts position t.

    Args:
      params: parameters of the network.
      cache: the cache after position t - 1.
      tokens_B: symbols at t - 1; ignored at t = 0.
      t: the position, traced.
      table: the row of `tables` for t.

    Returns:
      (logits_BV, the cache after t).
    """
    place = {pattern: i for i, pattern in enumerate(self.plans)}

    def attend(cache, layer, index, directions, q_B1HK, k_B1HK, v_B1HE):
      outs, groups = [], []
      for kept, (pattern, heads) in zip(
        cache[layer], self._groups(layer), strict=True
      ):
        plan = self.plans[pattern]
        slot, read = table[place[pattern]]
        q, k, v = (x[:, :, heads] for x in (q_B1HK, k_B1HK, v_B1HE))
        slots = tuple(
          s.at[index, :, :, slot].set(x[:, 0])
          for s, x in zip(kept[:2], (k, v), strict=True)
        )
        states = list(kept[2:])
        if states:
          of_layer = [x[index] for x in slots]
          given = content_cache.take_heads(directions, heads)
          states, bias = content_cache.step(
            pattern, states, index, t, slot, q, of_layer[0], given
          )
          k, v = of_layer
          row = _narrow(k, v, bias, plan.width)
        else:
          row = plan.take(slots, index, read)
        outs.append(_attend_row(q[:, 0], *row))
        groups.append((*slots, *states))
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


def _narrow(
  k_BHSK: jax.Array, v_BHSE: jax.Array, bias_BHS: jax.Array, width: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The slots of at most `width` keys of a query, if these are few."""
  if 2 * width > k_BHSK.shape[2]:
    return k_BHSK, v_BHSE, bias_BHS
  bias_BHS = jnp.broadcast_to(bias_BHS, k_BHSK.shape[:3])
  bias_BHR, slots_BHR = jax.lax.top_k(bias_BHS, width)
  k, v = (
    jnp.take_along_axis(x, slots_BHR[..., None], 2) for x in (k_BHSK, v_BHSE)
  )
  return k, v, bias_BHR


def _attend_row(
  q_BHK: jax.Array, k_BHRK: jax.Array, v_BHRE: jax.Array, bias_BHR: jax.Array
) -> jax.Array:
  """Attention of one query per head: out_BHE, 0 where a row has no keys.

  Args:
    q_BHK: the queries.
    k_BHRK, v_BHRE: keys and values.
    bias_BHR: what is added to scores, [B or 1, H or 1, R]: -inf for keys
      outside the row.
  """
  dtype = jnp.promote_types(q_BHK.dtype, jnp.float32)
  q_BHK = q_BHK.astype(dtype) / np.sqrt(q_BHK.shape[-1])
  s_BHR = jnp.einsum("bhk,bhrk->bhr", q_BHK, k_BHRK.astype(dtype)) + bias_BHR
  max_BH1 = s_BHR.max(-1, keepdims=True, initial=jnp.finfo(dtype).min)
  p_BHR = jnp.exp(s_BHR - max_BH1)
  sum_BH1 = p_BHR.sum(-1, keepdims=True)
  out_BHE = jnp.einsum("bhr,bhre->bhe", p_BHR, v_BHRE.astype(dtype))
  out_BHE = out_BHE / jnp.where(sum_BH1 == 0, 1, sum_BH1)
  return out_BHE.astype(k_BHRK.dtype)
