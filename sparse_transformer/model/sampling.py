"""Samples sequences from a trained network, position by position.

A decoder has two methods. `prefill` returns the decoder's state after a prompt.
The prompt may be empty. `step` takes the state and the symbols at t - 1, and
returns the logits_BV of position t and the next state. At t = 0, it ignores the
symbols.
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

CHUNK = 32  # positions per call of the device, after which sampling can stop
# The smallest temperature and top_p. Smaller values would overflow or vanish in
# float32.
LEAST = 1e-6

# maps the first layer of each scanned group to its cache
Caches = dict[int, attention.Cache]


@dataclasses.dataclass(frozen=True)
class Recompute:
  """A decoder without a cache. Its state is the sequence so far.

  Each step runs the network on the whole sequence. This also works for networks
  with documents, which the cache does not support.
  """

  apply: Callable[..., jax.Array]  # from `model.make_apply`
  length: int  # positions in a sequence
  # labels of the scan order, see `data.arrangements`
  labels: tuple[int, ...] = ()

  def prefill(self, params: dict, tokens_BL: jax.Array) -> jax.Array:
    padding = self.length - tokens_BL.shape[1]
    return jnp.pad(tokens_BL, ((0, 0), (0, padding)))

  def step(
    self, params: dict, state: jax.Array, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    # At t = 0, this writes to the last position, which is drawn later. That
    # does not matter, because no position sees later ones.
    state = state.at[:, t - 1].set(tokens_B)
    order_labels_BO = jnp.array([self.labels] * len(state), state.dtype)
    logits_BLV = self.apply(params, jnp.hstack([state, order_labels_BO]))
    return lax.dynamic_index_in_dim(logits_BLV, t, 1, keepdims=False), state


@dataclasses.dataclass(frozen=True)
class Cached:
  """A decoder that caches the keys and values that later positions read.

  The network must not use documents.
  """

  config: Config
  labels: tuple[int, ...] = ()

  def init(self, batch: int) -> Caches:
    """Maps the first layer of each scanned group to the group's empty cache."""
    config = self.config
    caches = {}
    for layer, num_layers in stacks.sizes(config).items():
      caches[layer] = attention.init_cache(
        config.patterns[layer],
        length=config.length,
        batch=batch,
        num_heads=config.num_heads,
        num_key_heads=config.num_key_heads,
        qk_width=config.head_width,
        value_width=config.widths[1],
        dtype=config.dtype,
        layers=num_layers,
      )
    return caches

  def prefill(self, params: dict, tokens_BL: jax.Array) -> Caches:
    def attend(caches, layer, index, inputs):
      filled = attention.fill_cache(
        caches[layer],
        inputs.q_BLHK,
        inputs.k_BLGK,
        inputs.v_BLGE,
        layer=index,
        directions=inputs.keywords.get("directions"),
      )
      return network.attend(caches | {layer: filled}, layer, index, inputs)

    caches = self.init(len(tokens_BL))
    # An empty prompt needs no run of the network.
    if not tokens_BL.shape[1]:
      return caches
    network = transformer.bind(self.config, params)
    x_BLD = network.embed(tokens_BL, jnp.array([self.labels]))
    _, caches, _ = network.run_blocks(x_BLD, attend, caches)
    return caches

  # The blocks run on a single position, whose queries read the caches.
  def step(
    self, params: dict, state: Caches, tokens_B: jax.Array, t: jax.Array
  ) -> tuple[jax.Array, Caches]:
    def attend(caches, layer, index, inputs):
      out_BHE, read = attention.attend_next(
        caches[layer],
        inputs.q_BLHK[:, 0],
        inputs.k_BLGK[:, 0],
        inputs.v_BLGE[:, 0],
        t,
        layer=index,
        **inputs.keywords,
      )
      return out_BHE[:, None], caches | {layer: read}

    network = transformer.bind(self.config, params)
    x_B1D = network.embed_next(tokens_B, t, jnp.array([self.labels]))
    x_B1D, state, _ = network.run_blocks(x_B1D, attend, state, first=t)
    return network.unembed(x_B1D)[:, 0], state


@dataclasses.dataclass(frozen=True)
class Sampler:
  """Draws symbols from logits.

  The settings apply in this order: temperature, top_k, top_p.

  >>> logits_BV = jnp.log(jnp.array([[0.1, 0.6, 0.3]]))
  >>> print(Sampler(top_k=1)(logits_BV, jax.random.key(0)))
  [1]
  """

  # divides the logits; 0 selects the most probable symbol
  temperature: float = 1.0
  top_k: int = 0  # draws only from the k most probable symbols; 0 for all
  # Draws only from the smallest set of most probable symbols, after top_k,
  # whose probabilities add up to top_p. Source: Holtzman et al. 2020, arXiv
  # 1904.09751.
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
    """Draws symbols_B, one for each row.

    Args:
      logits_BV: logits of the next position.
      rng: random key, unused at temperature 0.
    """
    if not self.temperature:
      return logits_BV.argmax(-1)

    # Symbols that are not kept get probability 0.
    logits_BV = logits_BV / self.temperature
    if self.top_k or self.top_p < 1:
      is_kept_BV = logits_BV >= self._least_kept(logits_BV)
      logits_BV = jnp.where(is_kept_BV, logits_BV, -jnp.inf)
    return jax.random.categorical(rng, logits_BV)

  def _least_kept(self, logits_BV):
    """Returns the smallest logit that may be drawn in each row: [B, 1]."""
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    if self.top_k:
      num_symbols = sorted_BV.shape[1]
      ranks_1V = jnp.arange(num_symbols)[None]
      # Symbols that tie with the last of these are kept, too.
      is_top_1V = ranks_1V < min(self.top_k, num_symbols)
      sorted_BV = jnp.where(is_top_1V, sorted_BV, -jnp.inf)

    p_BV = jax.nn.softmax(sorted_BV)
    # A symbol is kept if the probabilities of more probable ones add up to less
    # than top_p.
    before_BV = jnp.cumsum(p_BV, -1) - p_BV
    is_in_top_p_BV = before_BV < self.top_p
    is_kept_BV = is_in_top_p_BV & (p_BV > 0)
    kept_BV = jnp.where(is_kept_BV, sorted_BV, jnp.inf)
    return kept_BV.min(-1, keepdims=True)


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
  """Completes prompts to sequences, and shows progress on a terminal.

  Args:
    decoder, params: decoder and parameters of the network.
    sampler: draws symbols from logits.
    prompts: the first symbols, [num, S], with an integer dtype that can
      represent all symbols; S may be 0.
    length: number of positions in a sequence.
    seed: random seed. The samples depend neither on the decoder nor on the size
      of chunks. With a smaller `length`, the samples are the same but end
      earlier.
    check_stop: called before each chunk; it may raise an error to stop
      sampling.

  Returns:
    (sequences in the dtype of the prompts, the sampling time in seconds without
    compilation).

  Raises:
    ValueError: a prompt is longer than a sequence, or its dtype cannot
      represent all symbols.
  """
  first = prompts.shape[1]
  if first > length:
    raise ValueError(
      f"a prompt of {first} positions does not fit in a sequence of"
      f" {length}; shorten it"
    )
  check_stop()  # check before compilation, which may take minutes

  parts = [prompts]
  seconds = 0.0
  with progress("position", length, first) as advance:
    for tokens_BC, elapsed in _chunks(
      decoder, sampler, params, prompts, length, seed
    ):
      parts.append(tokens_BC)
      seconds += elapsed
      advance(tokens_BC.shape[1])
      if sum(x.shape[1] for x in parts) < length:
        check_stop()
  return np.concatenate(parts, axis=1), seconds


def _chunks(decoder, sampler, params, prompts, length, seed):
  """Yields each chunk as (tokens_BC of the next positions, its seconds)."""
  num, first = prompts.shape
  if first == length:
    return

  # The last symbol is the input of the first step. Each position has its own
  # random key, so that samples do not depend on chunks.
  state = _prefill(decoder)(params, jnp.asarray(prompts))
  last_B = prompts[:, -1] if first else np.zeros(num, prompts.dtype)
  rngs = jax.random.split(jax.random.key(seed), length)

  # The state keeps its sharding, so that no step is compiled again.
  leaves, structure = jax.tree.flatten(state)
  shardings = tuple(x.sharding for x in leaves)
  draw = _draw(decoder, sampler, structure, shardings)
  # This call only compiles, if needed, and draws nothing.
  state, _ = draw(params, state, last_B, rngs, np.int32(first), np.int32(0))

  for position in range(first, length, CHUNK):
    start = time.perf_counter()
    count = min(CHUNK, length - position)
    state, drawn_BC = draw(
      params,
      state,
      last_B,
      rngs,
      np.int32(position),
      np.int32(count),
    )
    # This waits for the device, so that the time includes the whole chunk.
    tokens_BC = np.asarray(drawn_BC)[:, :count]
    last_B = tokens_BC[:, -1]
    yield tokens_BC, time.perf_counter() - start


@functools.lru_cache(maxsize=8)
def _prefill(decoder):
  return jax.jit(decoder.prefill)


@functools.lru_cache(maxsize=8)
def _draw(decoder, sampler, structure, shardings):
  """Returns a jitted function (..., first, count) -> (state, tokens_BC).

  C is `CHUNK`. The state keeps its sharding.
  """

  def draw(params, state, last_B, rngs, first, count):
    def step(i, carry):
      state, last_B, tokens_BC = carry
      t = first + i
      logits_BV, state = decoder.step(params, state, last_B, t)
      num_symbols = logits_BV.shape[1]
      # A symbol that does not fit would silently wrap around to a different
      # symbol.
      if num_symbols - 1 > jnp.iinfo(last_B.dtype).max:
        raise ValueError(
          f"prompts of {last_B.dtype} cannot represent {num_symbols:,} symbols;"
          " use a larger dtype, even if prompts are empty"
        )
      next_B = sampler(logits_BV, rngs[t])
      next_B = next_B.astype(tokens_BC.dtype)
      return state, next_B, tokens_BC.at[:, i].set(next_B)

    tokens_BC = jnp.zeros((len(last_B), CHUNK), last_B.dtype)
    carry = state, last_B, tokens_BC
    state, _, tokens_BC = lax.fori_loop(0, count, step, carry)
    return state, tokens_BC

  # The old state is donated, so that memory is needed for only one state.
  state_shardings = jax.tree.unflatten(structure, shardings)
  return jax.jit(
    draw,
    donate_argnums=1,
    out_shardings=(state_shardings, None),
  )
