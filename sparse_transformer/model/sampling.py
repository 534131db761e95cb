"""Draws sequences from a trained model.

python -m sparse_transformer.sample is the command; this is what it calls.
`cache.Decoder` takes the steps with a cache; `Recompute` is the plainest
correct way, a pass over the whole sequence for each of its positions.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import lax

CHUNK = 256  # positions between two looks at the progress, at most
PATIENCE = 1.0  # seconds between them, about


@dataclasses.dataclass(frozen=True)
class Recompute:
  """Steps of a network without a cache.

  apply: (params, tokens_BL) to logits_BLV. length: positions of a sequence.
  """

  apply: Callable
  length: int

  def tables(self, start, stop):
    return np.zeros(stop - start)  # nothing is looked up

  def prefill(self, params, tokens_BL):
    del params
    padding = self.length - tokens_BL.shape[1]
    return jnp.pad(tokens_BL, ((0, 0), (0, padding)))

  def step(self, params, state, tokens_B, t, table):
    del table
    # At t = 0 nothing stands before: what is written is written over.
    state = state.at[:, t - 1].set(tokens_B)
    logits_BLV = self.apply(params, state)
    return lax.dynamic_index_in_dim(logits_BLV, t, 1, keepdims=False), state


def sample(
  decoder,
  params,
  *,
  num,
  length,
  prompts=None,
  seed=0,
  name=None,
  check_stop=lambda: None,
  **options,
):
  """Draws `num` sequences: (uint8 [num, length], seconds without compilation).

  decoder: `cache.Decoder` or `Recompute`. prompts: uint8 [num, S], how the
  sequences begin. name: shows progress under that name on a terminal.
  check_stop: is called now and then; it may raise what ends the work.
  options: those of `choose`.
  """
  if num < 1:
    raise ValueError(f"{num=} sequences: at least 1")
  prompts = np.zeros((num, 0), np.uint8) if prompts is None else prompts
  start = prompts.shape[1]
  if start > length:
    raise ValueError(
      f"a prompt of {start} positions does not fit into the {length} of a"
      " sequence"
    )
  check(**options)
  run = jax.jit(functools.partial(_draw, decoder, options), donate_argnums=1)
  state = jax.jit(decoder.prefill)(params, jnp.asarray(prompts))
  before_B = jnp.asarray(prompts[:, -1] if start else np.zeros(num, np.uint8))
  keys = jax.random.split(jax.random.key(seed), length)
  tokens, seconds, compiled = [prompts], 0.0, None
  with tqdm.tqdm(
    total=num * (length - start),
    desc=name,
    unit="token",
    leave=False,
    disable=not (name and sys.stderr.isatty()),
  ) as bar:
    first, count = start, 1
    while first < length:
      check_stop()
      began = time.perf_counter()
      tables = jax.tree.map(_pad, decoder.tables(first, first + count))
      steps = _pad(keys[first : first + count]), np.int32(first)
      inputs = params, state, before_B, tables, *steps, np.int32(count)
      if compiled is None:
        compiling = time.perf_counter()
        compiled = run.lower(*inputs).compile()
        began += time.perf_counter() - compiling
      state, new_BC = compiled(*inputs)
      new_BC = np.asarray(new_BC)[:, :count]
      before_B = jnp.asarray(new_BC[:, -1])
      tokens.append(new_BC)
      took = time.perf_counter() - began
      seconds += took
      bar.update(num * count)
      first += count
      count = int(min(count * PATIENCE / took, 4 * count, CHUNK))
      count = max(1, min(count, length - first))
  return np.concatenate(tokens, axis=1), seconds


def _draw(
  decoder, options, params, state, before_B, tables, keys, first, count
):
  """Draws positions first, first + 1, ...: (the state behind, tokens_BC)."""

  def step(i, carry):
    state, before_B, tokens_BC = carry
    table = jax.tree.map(lambda x: x[i], tables)
    logits_BV, state = decoder.step(params, state, before_B, first + i, table)
    new_B = choose(logits_BV, keys[i], **options).astype(tokens_BC.dtype)
    return state, new_B, tokens_BC.at[:, i].set(new_B)

  tokens_BC = jnp.zeros((len(before_B), CHUNK), before_B.dtype)
  carry = lax.fori_loop(0, count, step, (state, before_B, tokens_BC))
  return carry[0], carry[2]


def _pad(x):
  """The rows of a chunk; the last chunk has fewer, its last is repeated."""
  return x[np.minimum(np.arange(CHUNK), len(x) - 1)]


def choose(logits_BV, key, *, temperature=1.0, top_k=0, top_p=1.0):
  """Draws a symbol for each row.

  temperature: divides the logits; 0 takes the most probable symbol. top_k:
  only the k most probable are drawn; 0: all. top_p: of these, the most
  probable that together just reach this probability (Holtzman et al. 2020,
  arXiv 1904.09751).
  """
  if not temperature:
    return logits_BV.argmax(-1)
  logits_BV = logits_BV / temperature
  sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
  if top_k:
    drawn_1V = jnp.arange(sorted_BV.shape[1])[None] < top_k
    sorted_BV = jnp.where(drawn_1V, sorted_BV, -jnp.inf)
  if top_k or top_p < 1:
    p_BV = jax.nn.softmax(sorted_BV)
    # What stands before a symbol must not reach top_p by itself.
    kept_BV = (jnp.cumsum(p_BV, -1) - p_BV < top_p) & (p_BV > 0)
    least_B1 = jnp.where(kept_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  return jax.random.categorical(key, logits_BV)


def check(*, temperature=1.0, top_k=0, top_p=1.0):
  """Refuses options that make no sense."""
  if not temperature >= 0:
    raise ValueError(f"{temperature=} must be 0 or more")
  if top_k < 0:
    raise ValueError(f"{top_k=} must be at least 1, or 0: all symbols")
  if not 0 < top_p <= 1:
    raise ValueError(f"{top_p=} must lie in (0, 1]")
