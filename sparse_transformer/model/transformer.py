"""The network of Child et al. 2019, section 5, with any attention patterns."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer import attention
from sparse_transformer.model import options, sharding, stacks
from sparse_transformer.model.block import rematerialized
from sparse_transformer.model.experts import take
from sparse_transformer.model.hyperparameters import Config
from sparse_transformer.model.stacks import Measured


class Transformer(nnx.Module):
  """Predicts each symbol of a sequence from those before it, or a label.

  Its only state is its parameters. Those of blocks and of options have a first
  axis of layers. No shape depends on the patterns, except on those that have
  parameters of their own: a checkpoint can be used with other patterns.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config
    embed = functools.partial(nnx.Embed, features=config.width, rngs=rngs)
    normal, axes = nnx.initializers.normal, config.axes
    std, position_std = config.token_std, config.position_std
    self.token = embed(config.vocab_size, embedding_init=normal(std))
    of_axis = normal(position_std / math.sqrt(max(1, len(axes))))
    self.position = nnx.List(embed(x, embedding_init=of_axis) for x in axes)
    draw = lambda: jax.random.normal(rngs.params(), (config.width,))
    self.start = None if config.classifies else nnx.Param(std * draw())
    for stack, blocks in stacks.init(config, rngs).items():
      setattr(self, stack, blocks)
    self.norm = nnx.LayerNorm(config.width, epsilon=1e-6, rngs=rngs)
    # Zeros: an untrained network gives every symbol, or class, the same
    # probability. No bias, as in the paper.
    self.logits = nnx.Linear(
      config.width,
      config.outputs,
      use_bias=False,
      kernel_init=nnx.initializers.zeros,
      rngs=rngs,
    )
    # Drawn last: their presence must not change the other parameters.
    for option in options.of(config):
      for name, x in option.init(rngs).items():
        tree = jax.tree.map(nnx.Param, x)
        setattr(self, name, nnx.Dict(tree) if isinstance(x, dict) else tree)

  def __call__(
    self,
    tokens_BL: jax.Array,
    sizes_B: jax.Array | None = None,
    *,
    rng: jax.Array | None = None,
  ) -> tuple[jax.Array, Measured]:
    """Predicts all positions at once, or the label of each sequence.

    Args:
      tokens_BL: symbols, of any integer dtype; L is at most `config.length`.
      sizes_B: how many of them a classifier reads, at least 1; None for all.
      rng: key for dropout; None applies no dropout.

    Returns:
      (logits_BLV in float32, those of position t from the tokens before t, or
      logits_BC of a classifier; what blocks measure, for training).
    """
    segments_BL = None
    if sizes_B is not None:
      # Padding is another segment, so that no symbol attends to it.
      at_1L = jnp.arange(tokens_BL.shape[1])[None]
      segments_BL = (at_1L >= sizes_B[:, None]).astype(jnp.int32)
    if (separator := self.config.separator) is not None:
      # Position t sees the symbols before t: a separator begins a document.
      ends_BL = (tokens_BL == separator).astype(jnp.int32)
      segments_BL = jnp.cumsum(ends_BL, axis=1) - ends_BL
    attend = functools.partial(self.attend, segments_BL=segments_BL)
    x_BLD = self.embed(tokens_BL)
    x_BLD, _, measured = self.run_blocks(x_BLD, attend, rng=rng)
    if not self.config.classifies:
      return self.unembed(x_BLD), measured
    is_valid = None if segments_BL is None else (segments_BL == 0)[..., None]
    return self.logits(self.norm(x_BLD).mean(1, where=is_valid)), measured

  def attend(
    self,
    cache: Any,
    layer: int,
    index: jax.Array | int,
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGE: jax.Array,
    **keywords: Any,
  ) -> tuple[jax.Array, Any]:
    """Attention of one layer, over whole sequences: (out_BLHE, the cache).

    The layer is the first of its stack, and `index` its place in it, see
    `stacks.stacks`; the cache is a pytree that passes from layer to layer. The
    others are as in `attention.attend`.
    """
    del index
    out_BLHE = attention.attend(
      q_BLHK,
      k_BLGK,
      v_BLGE,
      self.config.patterns[layer],
      backend=self.config.backend,
      tile=self.config.tile,
      spec=sharding.heads(*q_BLHK.shape[:2]),
      **keywords,
    )
    return out_BLHE, cache

  # The backward pass needs the norm's input only.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def unembed(self, x_BLD: jax.Array) -> jax.Array:
    """Predicts from the residual stream after the last block: logits_BLV."""
    return self.logits(self.norm(x_BLD))

  def embed(self, tokens_BL: jax.Array) -> jax.Array:
    """Embeds symbols as float32 x_BLD, shifted right by one after the start.

    A classifier has all of them, without the start.

    Raises:
      ValueError: if there are more tokens than positions.
    """
    b, n = tokens_BL.shape
    if n > self.config.length:
      raise ValueError(
        f"{n} tokens, but the network has {self.config.length} positions; cut"
        " the sequence or configure a longer one"
      )
    # Gradients are summed over the batch. If it is split, each device has to
    # add its own to the table first, and then sends the table, not [L, D].
    rows = b if sharding.size(*sharding.SEQUENCES) > 1 else 1
    places = np.unravel_index(np.arange(n), self.config.axes or (n,))
    x_BLD = self.token(tokens_BL)
    for embed, place_L in zip(self.position, places, strict=False):
      x_BLD = x_BLD + embed(jnp.broadcast_to(place_L, (rows, n)))
    if self.start is None:
      return x_BLD
    start_B1D = jnp.broadcast_to(self.start[...], (b, 1, x_BLD.shape[2]))
    return jnp.concatenate([start_B1D, x_BLD[:, :-1]], axis=1)

  def embed_next(self, tokens_B: jax.Array, t: jax.Array) -> jax.Array:
    """Embeds position t from the symbols at t - 1, ignored at t = 0: x_B1D."""
    assert self.start is not None  # only generators decode
    x_BD = self.token(tokens_B)
    places = jnp.unravel_index(t - 1, self.config.axes or (1,))
    for embed, place in zip(self.position, places, strict=False):
      x_BD = x_BD + embed(place[None])
    return jnp.where(t > 0, x_BD, self.start[...][None])[:, None]

  def run_blocks(
    self,
    x_BLD: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    cache: Any = None,
    rng: jax.Array | None = None,
    first: jax.Array | int = 0,
  ) -> tuple[jax.Array, Any, Measured]:
    """Applies the blocks: a scan over full periods, and then the last layers.

    Args:
      x_BLD: embedded symbols, from `embed` or `embed_next`.
      attend: attention of each layer, like `Transformer.attend`.
      cache: what the first layer's `attend` gets.
      rng: key for dropout; None applies no dropout.
      first: the first position.

    Returns:
      (x_BLD and the cache after the last block, what blocks measure).
    """
    x_BLD = sharding.split_stream(x_BLD)
    config, period = self.config, stacks.period(self.config)
    num, (stacked, make_block) = config.num_layers, self._stacked(rng)
    apply: Callable = functools.partial(
      self._apply_block, attend, make_block, first
    )
    apply = rematerialized(apply, config.remat, layer_argument=2)

    def apply_layers(carry, layers, index, stacked):
      (x_BLD, cache), measured = carry, []
      for layer in layers:
        # The rounding errors of a residual stream in bfloat16 would add up. The
        # block reads a copy, which is also what the backward pass keeps.
        y_BLD, cache, new = apply(
          x_BLD.astype(config.dtype), cache, layer, index, stacked
        )
        with jax.named_scope("residual"):
          x_BLD = sharding.split_stream(x_BLD + y_BLD)
        measured.append(new)
      return (x_BLD, cache), measured

    carry, scanned = jax.lax.scan(
      lambda carry, inputs: apply_layers(carry, range(period), *inputs),
      (x_BLD, cache),
      (jnp.arange(num // period), stacks.by_period(config, stacked)),
    )
    rest = range(num - num % period, num)
    (x_BLD, cache), last = apply_layers(carry, rest, 0, stacked)
    return x_BLD, cache, stacks.by_layer(scanned, last)

  def _stacked(self, rng):
    """({name: what layers own, stacked}, makers of blocks by their stack)."""
    own = options.own_params(self.config, nnx.to_pure_dict(nnx.state(self)))
    rngs = None
    if rng is not None:  # two for each layer
      rngs = jax.random.split(rng, self.config.num_layers)
      rngs = jax.vmap(jax.random.split)(rngs)
    stacked: dict[str, Any] = dict(rngs=rngs, options=own)
    make_block = {}
    for name in {x.stack for x in options.block_kinds(self.config)}:
      stacked[name], make_block[name] = stacks.pack(getattr(self, name))
    return stacked, make_block

  def _apply_block(
    self, attend, make_block, first, x_BLD, cache, layer, index, stacked
  ):
    """(What a block adds to the stream, the cache, what it measures)."""
    # The layer is taken here, so that a rematerialized block keeps only the
    # inputs of the scan, which are not copied.
    config, kind = self.config, options.block_kinds(self.config)[layer].stack
    packed, params, rngs = (
      take(stacked[name], stacks.index_in(config, name, layer))
      for name in (kind, "options", "rngs")
    )
    heads, stack = config.patterns[layer], stacks.stacks(config)[layer]
    where = options.Layer(heads, stack, index, first, params)

    def attend_heads(q_BLHK, k_BLGK, v_BLGE):
      inputs = options.Inputs(q_BLHK, k_BLGK, v_BLGE, {})
      inputs = options.prepare(config, where, inputs)
      *arrays, keywords = inputs
      out_BLHE, new = attend(cache, layer, index, *arrays, **keywords)
      return out_BLHE, (new, options.measure(config, where, inputs))

    block = make_block[kind](packed)
    y_BLD, (cache, of_heads), of_mlp = block(x_BLD, attend_heads, rngs)
    return y_BLD, cache, of_heads | of_mlp


def init_params(config: Config, seed: int) -> dict:
  """Draws the initial parameters of a network: nested dicts of arrays."""
  model = Transformer(config, rngs=nnx.Rngs(seed))
  return nnx.to_pure_dict(nnx.state(model))


def bind(config: Config, params: dict) -> Transformer:
  """Returns the network with the given parameters."""
  return nnx.merge(_abstract(config)[0], params)


def make_apply(config: Config) -> Callable[..., jax.Array]:
  """The network as apply(params, tokens_BL, rng=None) -> logits_BLV.

  A classifier takes rows of `data.Sequences`, without reading their labels, and
  returns logits_BC.
  """
  predict = make_predict(config)
  return lambda *args, **rng: predict(*args, **rng)[0]


def make_predict(config: Config) -> Callable[..., tuple[jax.Array, Measured]]:
  """As `make_apply`, for training: returns (logits, measured)."""

  def predict(params, tokens_BL, rng=None):
    sizes_B = None
    if config.classifies:
      tokens_BL, sizes_B = tokens_BL[:, :-2], tokens_BL[:, -1]
    return bind(config, params)(tokens_BL, sizes_B, rng=rng)

  return predict


def param_shapes(config: Config) -> dict:
  """The shapes and dtypes of `init_params`, which is not run."""
  return nnx.to_pure_dict(_abstract(config)[1])


def count_parameters(config: Config) -> int:
  """Counts the parameters of a network without allocating them."""
  return sum(x.size for x in jax.tree.leaves(param_shapes(config)))


def count_active_parameters(config: Config) -> int:
  """Counts the parameters that one position uses."""
  leaves = jax.tree_util.tree_leaves_with_path(param_shapes(config))
  return sum(options.num_active(config, path, x.size) for path, x in leaves)


@functools.lru_cache(maxsize=64)
def _abstract(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """The network, with shapes in place of arrays."""
  network = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.split(network)
