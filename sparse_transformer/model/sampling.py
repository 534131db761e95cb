"""Samples sequences from a trained network, position by position.

`prefill` of a decoder makes the state after a prompt, which may be empty;
`step` returns the logits_BV of position t and the next state, from the symbols
at t - 1, ignored at t = 0.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer import attention
from sparse_transformer.model import stacks, transformer
from sparse_transformer.model.configure import Config
from sparse_transformer.progress import progress

CHUNK = 32  # positions per call to the device, which delays stopping
# The least temperature and top_p; smaller ones overflow or vanish in float32.
LEAST = 1e-6

Caches = dict[int, attention.Cache]  # of layers that run as one, by the first


@dataclasses.dataclass(frozen=True)
class Recompute:
  """A decoder without a cache."""

  apply: Callable[..., jax.Array]  # as from `model.make_apply`
  length: int  # positions in a sequence
  labels: tuple[int, ...] = ()  # of the scan, see `data.Scans`

  def prefill(self, params: dict, tokens_BL: jax.Array) -> jax.Array:
    padding = self.length - tokens_BL.shape[1]
    return jnp.pad(tokens_BL, ((0, 0), (0, padding)))

  def step(
    self, params: dict, state: jax.Array, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    # At t = 0 this writes to the last position, which is drawn later.
    state = state.at[:, t - 1].set(tokens_B)
    labels_BK = jnp.array([self.labels] * len(state), state.dtype)
    logits_BLV = self.apply(params, jnp.hstack([state, labels_BK]))
    return lax.dynamic_index_in_dim(logits_BLV, t, 1, keepdims=False), state


@dataclasses.dataclass(frozen=True)
class Cached:
  """A decoder that keeps the keys and values that later positions read."""

  config: Config
  labels: tuple[int, ...] = ()

  def init(self, batch: int) -> Caches:
    config = self.config
    if config.separator is not None:
      raise ValueError(
        "the cache holds one document: sample from a run with data.documents"
        " with --nocache"
      )
    return {
      layer: attention.init_cache(
        config.patterns[layer],
        length=config.length,
        batch=batch,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        qk_width=config.head_width,
        value_width=config.widths[1],
        dtype=config.dtype,
        layers=size,
      )
      for layer, size in stacks.sizes(config).items()
    }

  def prefill(self, params: dict, tokens_BL: jax.Array) -> Caches:
    def attend(caches, layer, index, *inputs, **keywords):
      given = dict(layer=index, directions=keywords.get("directions"))
      new = attention.fill_cache(caches[layer], *inputs, **given)
      caches = caches | {layer: new}
      return model.attend(caches, layer, index, *inputs, **keywords)

    caches = self.init(len(tokens_BL))
    if not tokens_BL.shape[1]:
      return caches
    model = transformer.bind(self.config, params)
    x_BLD = model.embed(tokens_BL, jnp.array([self.labels]))
    return model.run_blocks(x_BLD, attend, caches)[1]

  def step(
    self, params: dict, state: Caches, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, Caches]:
    def attend(caches, layer, index, *inputs, **keywords):
      q_BHK, k_BGK, v_BGE = (x[:, 0] for x in inputs)
      keywords |= dict(layer=index)
      out_BHE, new = attention.attend_next(
        caches[layer], q_BHK, k_BGK, v_BGE, t, **keywords
      )
      return out_BHE[:, None], caches | {layer: new}

    model = transformer.bind(self.config, params)
    x_B1D = model.embed_next(tokens_B, t, jnp.array([self.labels]))
    x_B1D, state, _ = model.run_blocks(x_B1D, attend, state, first=t)
    return model.unembed(x_B1D)[:, 0], state


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws symbols from logits."""

  temperature: float = 1.0  # divides the logits; 0 takes the most probable one
  top_k: int = 0  # draws from the k most probable symbols only; 0 from all
  # Draws from the smallest set of the most probable of these whose
  # probabilities add up to top_p: Holtzman et al. 2020, arXiv 1904.09751.
  top_p: float = 1.0

  def __post_init__(self) -> None:
    is_finite = LEAST <= self.temperature < math.inf
    for name, is_valid, rule in (
      ("temperature", self.temperature == 0 or is_finite, f"0, or {LEAST} up"),
      ("top_k", self.top_k >= 0, "at least 1, or 0 for all symbols"),
      ("top_p", LEAST <= self.top_p <= 1, f"{LEAST} to 1, which is all"),
    ):
      if not is_valid:
        raise ValueError(f"{name}={getattr(self, name)} must be {rule}")

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
  decoder: Recompute | Cached,
  params: dict,
  sampler: Sampler,
  prompts: np.ndarray,
  length: int,
  *,
  seed: int = 0,
  check_stop: Callable[[], None] = lambda: None,
) -> tuple[np.ndarray, float]:
  """Completes prompts to sequences of `length`, with a bar on a terminal.

  Args:
    decoder, params: of the network.
    sampler: draws symbols from logits.
    prompts: the first positions, [num, S], of an integer dtype that has all
      symbols; S may be 0.
    length: positions in a sequence.
    seed: gives the same samples with any decoder and in any chunks; those of
      a smaller `length` are the first symbols of these.
    check_stop: called before each chunk; may raise to end the work.

  Returns:
    (sequences of the dtype of the prompts, seconds without compiling).
  """
  tokens, seconds, left = [prompts], 0.0, length - prompts.shape[1]
  if left < 0:
    raise ValueError(
      f"a prompt of {prompts.shape[1]} positions does not fit in a sequence of"
      f" {length}; shorten it"
    )
  check_stop()  # compilation may take minutes
  chunks = _chunks(decoder, sampler, params, prompts, length, seed)
  with progress("position", length, prompts.shape[1]) as advance:
    for new_BC, took in chunks:
      tokens.append(new_BC)
      seconds += took
      left -= new_BC.shape[1]
      advance(new_BC.shape[1])
      if left:
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
  state, _ = draw(params, state, last, rngs, np.int32(first), np.int32(0))
  for at in range(first, length, CHUNK):
    count, start = min(CHUNK, length - at), time.perf_counter()
    places = np.int32(at), np.int32(count)
    state, tokens_BC = draw(params, state, last, rngs, *places)
    new_BC = np.asarray(tokens_BC)[:, :count]
    last = new_BC[:, -1]
    yield new_BC, time.perf_counter() - start


# A run samples again and again, after each validation.
@functools.lru_cache(maxsize=8)
def _prefill(decoder):
  return jax.jit(decoder.prefill)


@functools.lru_cache(maxsize=8)
def _draw(decoder, sampler, structure, shardings):
  """Jitted (..., first, count) -> (state, tokens_BC), where C is `CHUNK`."""

  def draw(params, state, last_B, rngs, first, count):
    def step(i, carry):
      state, last_B, tokens_BC = carry
      logits_BV, state = decoder.step(params, state, last_B, first + i)
      if logits_BV.shape[1] - 1 > jnp.iinfo(last_B.dtype).max:
        raise ValueError(
          f"prompts of {last_B.dtype} cannot hold {logits_BV.shape[1]:,}"
          " symbols; use a larger dtype, even if prompts are empty"
        )
      new_B = sampler(logits_BV, rngs[first + i]).astype(tokens_BC.dtype)
      return state, new_B, tokens_BC.at[:, i].set(new_B)

    tokens_BC = jnp.zeros((len(last_B), CHUNK), last_B.dtype)
    carry = lax.fori_loop(0, count, step, (state, last_B, tokens_BC))
    return carry[0], carry[2]

  out_shardings = jax.tree.unflatten(structure, shardings), None
  return jax.jit(draw, donate_argnums=1, out_shardings=out_shardings)
