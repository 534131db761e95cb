"""The cache of decoding, derived from the patterns.

Sequences are drawn position by position. A head keeps a key from its own
position to that of its last reader, then its slot is used anew; a step reads
only the keys of its own row. Both follow from the pattern's `mask`: Local
keeps the last keys; Block and Summary the block at work and the summaries;
Strided keeps all, and reads every stride-th.

Names of axes are those of the README; S slots, R keys of a row.
"""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.model import transformer as model_lib
from sparse_transformer.patterns import analysis as structure


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """Where the keys of one causal pattern are kept over n steps.

  slots: [n], the place of each key; `size` for those that nobody reads.
  size: number of places. width: the most keys of a query.
  """

  pattern: object
  slots: np.ndarray
  last: np.ndarray
  size: int
  width: int

  def rows(self, start, stop):
    """Places of the keys of some queries: int32 [stop - start, width].

    `size` behind the last key of a row.
    """
    queries = np.arange(start, stop, dtype=np.int32)
    # Those behind `stop` have no reader here: the pattern is causal.
    keys = np.flatnonzero(self.last[:stop] >= start).astype(np.int32)
    row, col = np.nonzero(self.pattern.mask(queries[:, None], keys))
    first = np.searchsorted(row, np.arange(stop - start))
    rows = np.full((stop - start, self.width), self.size, np.int32)
    rows[row, np.arange(len(row)) - first[row]] = self.slots[keys[col]]
    return rows

  @property
  def is_wide(self):
    """Whether a row may hold most places: then a step reads them all, in one
    piece, which takes less time than to gather many."""
    return 2 * self.width > self.size

  def reads(self, start, stop):
    """What steps read: `rows`, or if wide which places, bool [.., size + 1]."""
    rows = self.rows(start, stop)
    if not self.is_wide:
      return rows
    read = np.zeros((stop - start, self.size + 1), bool)
    np.put_along_axis(read, rows, True, axis=1)
    read[:, self.size] = False
    return read

  def held(self, stop):
    """The key at each place before step `stop`: int32 [size + 1], or `stop`."""
    keys = np.flatnonzero(self.last[:stop] >= stop)
    held = np.full(self.size + 1, stop, np.int32)
    held[self.slots[keys]] = keys
    return held


@functools.lru_cache(maxsize=256)
def plan(pattern, n):
  """The `Plan` of a pattern with the fewest places."""
  if not structure.is_causal(pattern, n):
    raise ValueError(
      f"{pattern} lets queries see later keys: nothing can be decoded with it"
    )
  last = structure.last_readers(pattern, n)
  slots = np.full(n, -1, np.int32)
  # Places become free behind the last reader.
  leaving, free, size = collections.defaultdict(list), [], 0
  for key in range(n):
    free += leaving.pop(key, ())
    if last[key] < key:
      continue
    if not free:
      free.append(size)
      size += 1
    slots[key] = free.pop()
    leaving[last[key] + 1].append(slots[key])
  slots[slots < 0] = size
  width = int(structure.keys_per_query(pattern, n).max())
  return Plan(pattern, slots, last, size, width)


@dataclasses.dataclass(frozen=True)
class Decoder:
  """Steps of a network with a cache, see `sampling.sample`.

  config: `model.Config`.
  """

  config: model_lib.Config

  @functools.cached_property
  def _plans(self):
    layers = self.config.patterns
    distinct = dict.fromkeys(p for heads in layers for p in heads)
    return {p: plan(p, self.config.length) for p in distinct}

  @functools.cached_property
  def _graph(self):
    return nnx.graphdef(
      nnx.eval_shape(
        lambda: model_lib.Transformer(self.config, rngs=nnx.Rngs(0))
      )
    )

  def _model(self, params):
    return nnx.merge(self._graph, params)

  def tables(self, start, stop):
    """Where the steps of some positions write and read: for each pattern."""
    return [
      (plan.slots[start:stop], plan.reads(start, stop))
      for plan in self._plans.values()
    ]

  def init(self, batch):
    """The empty cache: {layer: [(k, v) of each group of heads]}.

    A layer stands for all of its stack, `model.repeats`. k is [layers, B,
    heads, S + 1, K]; the last place takes what nobody reads.
    """
    config = self.config
    widths = config.qk_width, config.width

    def cache(count, pattern, heads, width):
      size, width = self._plans[pattern].size + 1, width // config.num_heads
      shape = count, batch, len(heads), size, width
      return jnp.zeros(shape, config.dtype)

    return {
      layer: [
        tuple(cache(count, *group, width) for width in widths)
        for group in self._groups(layer)
      ]
      for layer, count in model_lib.repeats(config.patterns).items()
    }

  def prefill(self, params, tokens_BL):
    """The cache behind the first positions of sequences, all at once."""
    batch, stop = tokens_BL.shape

    def attend(state, layer, i, q_BLHK, k_BLHK, v_BLHE):
      def fill(cache, x_BLH, pattern, heads):
        # Places that hold nothing take any key: no row names them.
        held = self._plans[pattern].held(stop)
        x_BSH = jnp.take(x_BLH[:, :, heads], held, axis=1, mode="clip")
        return cache.at[i].set(x_BSH.swapaxes(1, 2))

      filled = [
        (fill(k, k_BLHK, *group), fill(v, v_BLHE, *group))
        for (k, v), group in zip(state[layer], self._groups(layer), strict=True)
      ]
      state = state | {layer: filled}
      return model.attend(state, layer, i, q_BLHK, k_BLHK, v_BLHE)

    if not stop:
      return self.init(batch)
    model = self._model(params)
    return model.run(model.embed(tokens_BL), attend, self.init(batch))[1]

  def step(self, params, state, tokens_B, t, table):
    """(logits_BV of position t, the cache behind it).

    tokens_B: symbols at t - 1. table: that of position t, see `tables`.
    """

    def attend(state, layer, i, q_B1HK, k_B1HK, v_B1HE):
      outs, caches = [], []
      for cache, (pattern, heads) in zip(
        state[layer], self._groups(layer), strict=True
      ):
        slot, read = table[index[pattern]]
        q, *new = (x[:, 0, heads] for x in (q_B1HK, k_B1HK, v_B1HE))
        cache = tuple(
          c.at[i, :, :, slot].set(x) for c, x in zip(cache, new, strict=True)
        )
        plan = self._plans[pattern]
        if plan.is_wide:
          keys, real = (c[i] for c in cache), read
        else:
          keys = (jnp.moveaxis(c[i, :, :, read], 0, 2) for c in cache)
          real = read < plan.size
        outs.append(_attend_row(q, *keys, real))
        caches.append(cache)
      # Heads of a group stand together: back to their places.
      order = np.concatenate([heads for _, heads in self._groups(layer)])
      out_BHE = jnp.concatenate(outs, axis=1)[:, np.argsort(order)]
      return out_BHE[:, None], state | {layer: caches}

    index = {pattern: i for i, pattern in enumerate(self._plans)}
    model = self._model(params)
    x_B1D = model.embed_next(tokens_B, t)
    logits_B1V, state = model.run(x_B1D, attend, state)
    return logits_B1V[:, 0], state

  def _groups(self, layer):
    """[(pattern, the heads that use it)]."""
    patterns = self.config.patterns[layer]
    return [
      (pattern, np.flatnonzero([other == pattern for other in patterns]))
      for pattern in dict.fromkeys(patterns)
    ]

  def num_bytes(self, batch):
    """Of the cache."""
    cache = jax.eval_shape(lambda: self.init(batch))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))


def _attend_row(q_BHK, k_BHRK, v_BHRE, real_R):
  """One query a head over the keys of its row; 0 if there are none."""
  dtype = jnp.promote_types(q_BHK.dtype, jnp.float32)
  q_BHK = q_BHK.astype(dtype) / np.sqrt(q_BHK.shape[-1])
  s_BHR = jnp.einsum("bhk,bhrk->bhr", q_BHK, k_BHRK.astype(dtype))
  s_BHR = jnp.where(real_R[None, None], s_BHR, -jnp.inf)
  max_BH1 = s_BHR.max(-1, keepdims=True, initial=jnp.finfo(dtype).min)
  p_BHR = jnp.exp(s_BHR - max_BH1)
  sum_BH1 = p_BHR.sum(-1, keepdims=True)
  out_BHE = jnp.einsum("bhr,bhre->bhe", p_BHR, v_BHRE.astype(dtype))
  out_BHE = out_BHE / jnp.where(sum_BH1 == 0, 1, sum_BH1)
  return out_BHE.astype(v_BHRE.dtype)
