"""Samples sequences from a trained network, position by position.

`python -m sparse_transformer.sample` is the command built on it.
`kv_cache.Decoder` predicts with a key-value cache; `Recompute`, the plainest
correct way, runs a pass over the entire sequence for each position.
"""

import dataclasses
import functools
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import lax

CHUNK = 32  # positions per call to the device, which delays stopping
# The least temperature and top_p; smaller ones overflow or vanish in float32.
LEAST = 1e-6


class Decoder(Protocol):
  """Predicts the next position from the state after the previous one.

  Decoders are hashable, and equal ones do the same.
  """

  def prefill(self, params: dict, tokens_BL: jax.Array) -> Any:
    """The state after a prompt, which may be empty."""

  def step(
    self, params: dict, state: Any, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, Any]:
    """(logits_BV of position t, the new state) from the symbols at t - 1.

    At t = 0 the symbols are ignored.
    """


@dataclasses.dataclass(frozen=True)
class Recompute(Decoder):
  """A `Decoder` without a cache."""

  apply: Callable[..., jax.Array]  # as from `model.make_apply`
  length: int  # positions in a sequence

  def prefill(self, params: dict, tokens_BL: jax.Array) -> jax.Array:
    del params
    padding = self.length - tokens_BL.shape[1]
    return jnp.pad(tokens_BL, ((0, 0), (0, padding)))

  def step(
    self, params: dict, state: Any, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, Any]:
    # At t = 0 this writes to the last position, which is drawn later.
    state = state.at[:, t - 1].set(tokens_B)
    logits_BLV = self.apply(params, state)
    return lax.dynamic_index_in_dim(logits_BLV, t, 1, keepdims=False), state


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws symbols from logits.

  Args:
    temperature: divides the logits; 0 takes the most probable symbol.
    top_k: draws from the k most probable symbols only; 0 from all.
    top_p: draws from the smallest set of the most probable of these whose
      probabilities add up to top_p; from 1e-6 to 1.

  Raises:
    ValueError: if an argument is out of range.

  Source: top_p is nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751.
  """

  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self) -> None:
    if self.temperature != 0 and not LEAST <= self.temperature < math.inf:
      raise ValueError(
        f"temperature={self.temperature} must be finite, and 0 or at least"
        f" {LEAST}"
      )
    if self.top_k < 0:
      raise ValueError(
        f"top_k={self.top_k} must be at least 1, or 0 for all symbols"
      )
    if not LEAST <= self.top_p <= 1:
      raise ValueError(
        f"top_p={self.top_p} must lie between {LEAST} and 1, which is all"
        " symbols"
      )

  def __call__(self, logits_BV: jax.Array, rng: jax.Array) -> jax.Array:
    """Draws symbols_B, one for each row."""
    if not self.temperature:
      return logits_BV.argmax(-1)
    logits_BV = logits_BV / self.temperature
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    size = sorted_BV.shape[1]
    if self.top_k:
      drawn_1V = jnp.arange(size)[None] < min(self.top_k, size)
      sorted_BV = jnp.where(drawn_1V, sorted_BV, -jnp.inf)
    if self.top_k or self.top_p < 1:
      p_BV = jax.nn.softmax(sorted_BV)
      # A symbol is kept if the more probable ones do not add up to top_p.
      kept_BV = (jnp.cumsum(p_BV, -1) - p_BV < self.top_p) & (p_BV > 0)
      least_B1 = jnp.where(kept_BV, sorted_BV, jnp.inf).min(-1, keepdims=True)
      logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
    return jax.random.categorical(rng, logits_BV)


def sample(
  decoder: Decoder,
  params: dict,
  sampler: Sampler,
  *,
  num: int,
  length: int,
  prompts: np.ndarray | None = None,
  seed: int = 0,
  name: str | None = None,
  check_stop: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, float]:
  """Draws sequences.

  Args:
    decoder, params: of the network.
    sampler: draws symbols from logits.
    num: number of sequences to draw.
    length: positions in a sequence.
    prompts: the first positions of the sequences, [num, S], of an integer dtype
      that has all symbols; none by default, of uint8.
    seed: samples do not depend on the decoder or on chunks.
    name: label of a progress bar on a terminal; None shows none.
    check_stop: called before each chunk; may raise to end the work.

  Returns:
    ([num, length] of the dtype of the prompts, seconds excluding compilation
    and prompts).

  Raises:
    ValueError: if `num` is below 1, or the prompts are longer than `length` or
      of a dtype too small for the vocabulary.
  """
  if num < 1:
    raise ValueError(f"{num=} must be at least 1")
  prompts = np.zeros((num, 0), np.uint8) if prompts is None else prompts
  if prompts.shape[1] > length:
    raise ValueError(
      f"a prompt of {prompts.shape[1]} positions does not fit in a sequence of"
      f" {length}; shorten it"
    )
  tokens, seconds = [prompts], 0.0
  with tqdm.tqdm(
    total=num * (length - prompts.shape[1]),
    desc=name,
    unit="token",
    leave=False,
    disable=not (name and sys.stderr.isatty()),
  ) as bar:
    check_stop()  # compilation may take minutes
    for new_BC, took in _chunks(
      decoder, sampler, params, prompts, length, seed
    ):
      tokens.append(new_BC)
      seconds += took
      bar.update(new_BC.size)
      if sum(x.shape[1] for x in tokens) < length:
        check_stop()
  return np.concatenate(tokens, axis=1), seconds


def _chunks(decoder, sampler, params, prompts, length, seed):
  """Yields (tokens_BC of the next positions, the seconds they took)."""
  num, first = prompts.shape
  if first == length:
    return
  state = _prefill(decoder)(params, jnp.asarray(prompts))
  last = prompts[:, -1] if first else np.zeros(num, prompts.dtype)
  rngs = jax.random.split(jax.random.key(seed), length)

  leaves, structure = jax.tree.flatten(state)
  draw = _draw(decoder, sampler, structure, tuple(x.sharding for x in leaves))
  # Compiles, if needed: draws nothing.
  places = np.int32(first), np.int32(0)
  state, _ = draw(params, state, jnp.asarray(last), rngs, *places)
  for at in range(first, length, CHUNK):
    count, start = min(CHUNK, length - at), time.perf_counter()
    places = np.int32(at), np.int32(count)
    state, tokens_BC = draw(params, state, jnp.asarray(last), rngs, *places)
    new_BC = np.asarray(tokens_BC)[:, :count]
    last = new_BC[:, -1]
    yield new_BC, time.perf_counter() - start


# A run samples again and again, after each validation.
@functools.lru_cache(maxsize=8)
def _prefill(decoder):
  return jax.jit(decoder.prefill)


@functools.lru_cache(maxsize=8)
def _draw(decoder, sampler, structure, shardings):
  """Draws positions first to first + count - 1: (the new state, tokens_BC).

  C is `CHUNK`, at least `count`. Each chunk gets the state of the last one.
  """

  def draw(params, state, last_B, rngs, first, count):
    def step(i, carry):
      state, last_B, tokens_BC = carry
      logits_BV, state = decoder.step(params, state, last_B, first + i)
      if logits_BV.shape[1] - 1 > jnp.iinfo(last_B.dtype).max:
        raise ValueError(
          f"prompts of {last_B.dtype} cannot hold {logits_BV.shape[1]:,}"
          " symbols; use a larger dtype, also of prompts of 0 positions"
        )
      new_B = sampler(logits_BV, rngs[first + i]).astype(tokens_BC.dtype)
      return state, new_B, tokens_BC.at[:, i].set(new_B)

    tokens_BC = jnp.zeros((len(last_B), CHUNK), last_B.dtype)
    carry = lax.fori_loop(0, count, step, (state, last_B, tokens_BC))
    return carry[0], carry[2]

  out_shardings = jax.tree.unflatten(structure, shardings), None
  return jax.jit(draw, donate_argnums=1, out_shardings=out_shardings)
