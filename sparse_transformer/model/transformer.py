"""The network of Child et al. 2019, section 5, with any attention patterns."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer import attention, patterns as patterns_lib
from sparse_transformer.attention import merged as blocked

INITS = ("code", "paper")
# What the backward pass recomputes, from the least to the most.
REMATS = ("none", "attention", "block_but_attention", "block")


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that defines a network, in types.

  vocab_size: symbols; length: positions in a sequence; shape: its geometry
  for the position embeddings, (rows, columns) or (rows, columns, channels).
  patterns: what attends to what, a tuple (layers) of tuples (heads).
  The other fields are those of `configs/default.py`.
  """

  vocab_size: int
  length: int
  shape: tuple[int, ...]
  patterns: tuple[tuple[patterns_lib.Pattern, ...], ...]
  num_layers: int
  num_heads: int
  width: int
  half_size: bool
  dropout: float
  init: str
  token_std: float
  position_std: float
  dtype: str
  remat: str
  backend: str = "auto"
  tile: int = 0

  def __post_init__(self):
    for field in ("num_layers", "num_heads", "width", "length"):
      if getattr(self, field) < 1:
        raise ValueError(
          f"model.{field} must be at least 1, got {getattr(self, field)}"
        )
    if self.qk_width % self.num_heads or self.width % self.num_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads} must divide model.width="
        f"{self.width} and the {self.qk_width} of queries and keys"
      )
    if not 0 <= self.dropout < 1:
      raise ValueError(f"model.dropout={self.dropout} must lie in [0, 1)")
    for field, known in (
      ("init", INITS),
      ("remat", REMATS),
      ("dtype", ("float32", "bfloat16")),
    ):
      if getattr(self, field) not in known:
        raise ValueError(
          f"unknown model.{field} {getattr(self, field)!r}; known:"
          f" {', '.join(known)}"
        )

  @property
  def qk_width(self):
    """Width of the queries and keys of all heads together."""
    return self.width // 2 if self.half_size else self.width

  @property
  def mlp_width(self):
    return self.width * (2 if self.half_size else 4)

  @property
  def axes(self):
    """The position-embedding axes: those of the geometry longer than 1."""
    return tuple(size for size in self.shape if size > 1) or (1,)


def configure(config, source):
  """The network of an experiment's config on a data source."""
  settings = dict(config.attention)
  backend, tile = settings.pop("backend"), settings.pop("tile")
  name, mode = settings.pop("pattern"), settings.pop("mode")
  is_named = name in patterns_lib.FACTORIZATIONS
  for field in ("stride", "window") if is_named else ():
    if not 1 <= settings[field] <= source.length:
      raise ValueError(
        f"attention.{field}={settings[field]} does not fit: it must lie"
        f" between 1 and the {source.length} positions of a sequence"
      )
  patterns = patterns_lib.assign(
    name,
    mode,
    num_layers=config.model.num_layers,
    num_heads=config.model.num_heads,
    **settings,
  )
  for pattern in () if is_named else set(itertools.chain(*patterns)):
    # A leak would make the likelihood of a sequence meaningless.
    leak = patterns_lib.first_leak(pattern, source.length)
    if leak:
      raise ValueError(
        f"attention.pattern {pattern} lets query {leak[0]} see the later key"
        f" {leak[1]}, but the model predicts each position from those before"
      )
  return Config(
    vocab_size=source.vocab_size,
    length=source.length,
    shape=tuple(source.shape),
    patterns=patterns,
    backend=backend,
    tile=tile,
    **config.model,
  )


class Block(nnx.Module):
  """A residual block: h + a + b, a the attention and b the MLP of h + a."""

  def __init__(self, config, *, rngs):
    self.config = config
    dense = functools.partial(
      nnx.Linear, dtype=jnp.dtype(config.dtype), rngs=rngs
    )
    norm = functools.partial(
      nnx.LayerNorm,
      config.width,
      epsilon=1e-5,
      dtype=jnp.dtype(config.dtype),
      rngs=rngs,
    )
    width, inner = config.width, config.mlp_width
    into = _weight_init(config, width)
    self.attention_norm = norm()
    self.query = dense(width, config.qk_width, kernel_init=into)
    self.key = dense(width, config.qk_width, kernel_init=into)
    self.value = dense(width, width, kernel_init=into)
    self.out = dense(
      width, width, kernel_init=_weight_init(config, width, True)
    )
    self.mlp_norm = norm()
    self.mlp_in = dense(width, inner, kernel_init=into)
    self.mlp_out = dense(
      inner, width, kernel_init=_weight_init(config, inner, True)
    )
    self.dropout = nnx.Dropout(config.dropout)

  def __call__(self, x_BLD, attend, key=None):
    """(output, what attend keeps); attend: (q, k, v) to (out, what it keeps).

    key: for dropout; None leaves it out.
    """
    keys = (None, None) if key is None else jax.random.split(key)
    attention = functools.partial(self._attention, attend)
    if self.config.remat == "attention":
      attention = jax.checkpoint(attention)
    a_BLD, kept = attention(x_BLD)
    a_BLD = self._drop(a_BLD, keys[0])
    b_BLD = self._drop(self._mlp(x_BLD + a_BLD), keys[1])
    return x_BLD + a_BLD + b_BLD, kept

  def _attention(self, attend, x_BLD):
    x_BLD = self.attention_norm(x_BLD)
    heads = *x_BLD.shape[:2], self.config.num_heads, -1
    out_BLHE, kept = attend(
      self.query(x_BLD).reshape(heads),
      self.key(x_BLD).reshape(heads),
      self.value(x_BLD).reshape(heads),
    )
    return self.out(out_BLHE.reshape(x_BLD.shape)), kept

  def _mlp(self, x_BLD):
    h_BLF = self.mlp_in(self.mlp_norm(x_BLD))
    return self.mlp_out(h_BLF * jax.nn.sigmoid(1.702 * h_BLF))

  def _drop(self, x_BLD, key):
    return self.dropout(x_BLD, deterministic=key is None, rngs=key)


class Transformer(nnx.Module):
  """Predicts each symbol of a sequence from those before it.

  `model(tokens_BL)` gives logits_BLV in float32; position t is predicted from
  the tokens before t. `model(tokens_BL, key=key)` applies dropout. The only
  state is the parameters; those of the blocks are stacked along a first axis
  of layers, whatever the patterns, so that weights are free of patterns.
  """

  def __init__(self, config, *, rngs):
    self.config = config
    token_std, position_std = _embedding_stds(config)
    embed = functools.partial(
      nnx.Embed,
      features=config.width,
      dtype=jnp.dtype(config.dtype),
      rngs=rngs,
    )
    self.token = embed(
      config.vocab_size, embedding_init=nnx.initializers.normal(token_std)
    )
    self.position = nnx.List(
      embed(size, embedding_init=nnx.initializers.normal(position_std))
      for size in config.axes
    )
    self.start = nnx.Param(
      token_std * jax.random.normal(rngs.params(), (config.width,))
    )
    stack = nnx.split_rngs(splits=config.num_layers)
    self.blocks = stack(nnx.vmap(lambda rngs: Block(config, rngs=rngs)))(rngs)
    self.norm = nnx.LayerNorm(
      config.width, epsilon=1e-6, dtype=jnp.dtype(config.dtype), rngs=rngs
    )
    # Zeros: an untrained network gives every symbol the same probability.
    # No bias, as in the paper; float32, since these are the likelihoods.
    self.logits = nnx.Linear(
      config.width,
      config.vocab_size,
      use_bias=False,
      kernel_init=nnx.initializers.zeros,
      rngs=rngs,
    )

  def __call__(self, tokens_BL, *, key=None):
    return self.run(self.embed(tokens_BL), self.attend, key=key)[0]

  def attend(self, state, layer, i, q_BLHK, k_BLHK, v_BLHE):
    """Attention of whole sequences, see `run`."""
    del i  # layers of one stack have the same patterns
    out_BLHE = attention.attend(
      q_BLHK,
      k_BLHK,
      v_BLHE,
      self.config.patterns[layer],
      backend=self.config.backend,
      tile=self.config.tile,
    )
    return out_BLHE, state

  def run(self, x_BLD, attend, state=None, key=None):
    """(logits_BLV, state) of embedded symbols; see `embed`, `embed_next`.

    attend: (state, layer, i, q, k, v) to (out, state), of the i-th layer, as a
    traced number, that is like `layer`; see `repeats`.
    """
    x_BLD, state = self._blocks(x_BLD, attend, state, key)
    return self.logits(self.norm(x_BLD).astype(jnp.float32)), state

  def embed_next(self, tokens_B, t):
    """x_B1D of position t, of which tokens_B stand before it; t is traced."""
    x_BD = self.token(tokens_B)
    places = jnp.unravel_index(t - 1, self.config.axes)
    for embed, place in zip(self.position, places, strict=True):
      x_BD = x_BD + embed(place)[None]
    start_1D = self.start[...].astype(x_BD.dtype)[None]
    return jnp.where(t > 0, x_BD, start_1D)[:, None]

  def embed(self, tokens_BL):
    """Embedded symbols, shifted right by one behind the start vector."""
    (b, n), d = tokens_BL.shape, self.config.width
    if n > self.config.length:
      raise ValueError(
        f"{n} tokens, but the network has {self.config.length} positions"
      )
    places = np.unravel_index(np.arange(n), self.config.axes)
    x_BLD = self.token(tokens_BL)
    for embed, place_L in zip(self.position, places, strict=True):
      x_BLD = x_BLD + embed(place_L)[None]
    start_B1D = jnp.broadcast_to(self.start[...].astype(x_BLD.dtype), (b, 1, d))
    return jnp.concatenate([start_B1D, x_BLD[:, :-1]], axis=1)

  def _blocks(self, x_BLD, attend, state, key):
    """All blocks: a scan over the periods of the patterns, then the rest."""
    config, (graph, params) = self.config, nnx.split(self.blocks)
    num_layers, period = config.num_layers, _period(config.patterns)
    keys = None if key is None else jax.random.split(key, num_layers)

    def apply(carry, layer, i, inputs):
      (x_BLD, state), (params, key) = carry, inputs
      block = nnx.merge(graph, params)
      return block(x_BLD, functools.partial(attend, state, layer, i), key)

    if config.remat in ("block", "block_but_attention"):
      # Saved by name: the outputs of attention, whose backward pass needs no
      # more than these and the queries, keys and values.
      kept = blocked.SAVED if config.remat == "block_but_attention" else ()
      apply = jax.checkpoint(
        apply,
        prevent_cse=False,
        static_argnums=1,
        policy=jax.checkpoint_policies.save_only_these_names(*kept),
      )

    def apply_period(carry, inputs):
      i, inputs = inputs
      for layer in range(period):
        carry = apply(carry, layer, i, _take(inputs, layer))
      return carry, None

    inputs, times = (params, keys), num_layers // period
    stacked = jax.tree.map(
      lambda p: p[: times * period].reshape(-1, period, *p.shape[1:]), inputs
    )
    carry, _ = jax.lax.scan(
      apply_period, (x_BLD, state), (jnp.arange(times), stacked)
    )
    for layer in range(times * period, num_layers):
      carry = apply(carry, layer, 0, _take(inputs, layer))
    return carry


def _take(tree, i):
  return jax.tree.map(lambda x: x[i], tree)


def _period(layers):
  """The smallest number of layers after which the patterns repeat."""
  return next(
    period
    for period in range(1, len(layers) + 1)
    if all(a == b for a, b in zip(layers, layers[period:], strict=False))
  )


def repeats(layers):
  """How many layers run as one stack: {its first layer: their number}.

  Those of a period of the patterns are repeated, the rest stand alone.
  """
  period = _period(layers)
  times = len(layers) // period
  stacks = dict.fromkeys(range(period), times)
  return stacks | dict.fromkeys(range(times * period, len(layers)), 1)


def _weight_init(config, fan_in, is_last=False):
  """Normal weights; those that end a residual branch 1/sqrt(2 N) smaller.

  The paper's 0.125 / sqrt(d_in), read as a standard deviation ("paper"), is
  2.83 times smaller than what the released code has ("code"):
  github.com/openai/distribution_augmentation, which trained its models.
  """
  if config.init == "paper":
    std = 0.125 / math.sqrt(fan_in)
  else:
    std = math.sqrt(0.125 / fan_in)
  return nnx.initializers.normal(
    std / math.sqrt(2 * config.num_layers) if is_last else std
  )


def _embedding_stds(config):
  """Standard deviations of (token, position) embeddings (section 6)."""
  spread = math.sqrt(len(config.axes))
  if config.init == "paper":
    std = 0.125 / math.sqrt(config.width)
    return std, std / spread
  return config.token_std, config.position_std / spread


def count_parameters(config):
  """The number of parameters of a network, without making it."""
  shapes = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(shapes)))
