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
from sparse_transformer.model.configure import Config
from sparse_transformer.model.experts import block_kinds, num_active
from sparse_transformer.model.stacks import Measured


class Transformer(nnx.Module):
  """Predicts each symbol of a sequence from the ones before, or a label.

  Parameters of blocks and options have a first axis of layers. No shape depends
  on patterns without parameters: a checkpoint can be used with others.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config
    embed = functools.partial(nnx.Embed, features=config.width, rngs=rngs)
    normal, axes = nnx.initializers.normal, config.axes
    std, position_std = config.token_std, config.position_std
    self.token = embed(config.vocab_size, embedding_init=normal(std))
    of_axis = normal(position_std / math.sqrt(max(1, len(axes))))
    self.position = nnx.List(embed(x, embedding_init=of_axis) for x in axes)
    draw = functools.partial(jax.random.normal, dtype=jnp.float32)
    start = lambda: std * draw(rngs.params(), (config.width,))
    self.start = None if config.classifies else nnx.Param(start())
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
    labels_BK: jax.Array | None = None,
    *,
    rng: jax.Array | None = None,
  ) -> tuple[jax.Array, Measured]:
    """Predicts all positions at once, or the label of each sequence.

    Args:
      tokens_BL: symbols; L is at most `config.length`.
      sizes_B: how many of them a classifier reads, at least 1; None for all.
      labels_BK: of their orders, see `Option.begin`.
      rng: key for dropout; None applies no dropout.

    Returns:
      (logits_BLV in float32, of position t from the tokens before t, or
      logits_BC of a classifier; what blocks measure).
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
    x_BLD = self.embed(tokens_BL, labels_BK)
    x_BLD, _, measured = self.run_blocks(x_BLD, attend, rng=rng)
    if not self.config.classifies:
      return self.unembed(x_BLD), measured
    is_valid = None if segments_BL is None else (segments_BL == 0)[..., None]
    return self.logits(self.norm(x_BLD).mean(1, where=is_valid)), measured

  def attend(
    self, cache: Any, layer: int, index: Any, *qkv: jax.Array, **keywords: Any
  ) -> tuple[jax.Array, Any]:
    """Attention of a layer, see `stacks.scan`: (out_BLHE, the cache).

    A cache is a pytree that passes from layer to layer.
    """
    del index
    config, (q_BLHK, k_BLGK, v_BLGE) = self.config, qkv
    out_BLHE = attention.attend(
      q_BLHK,
      k_BLGK,
      v_BLGE,
      config.patterns[layer],
      backend=config.backend,
      tile=config.tile,
      spec=sharding.heads(*q_BLHK.shape[:2]),
      **keywords,
    )
    return out_BLHE, cache

  # The backward pass needs the norm's input only.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def unembed(self, x_BLD: jax.Array) -> jax.Array:
    """Predicts from the residual stream after the last block: logits_BLV."""
    return self.logits(self.norm(x_BLD))

  def embed(self, tokens_BL: jax.Array, labels_BK: Any = None) -> jax.Array:
    """Embeds symbols as float32 x_BLD, shifted right by one after the start."""
    at_L = np.arange(tokens_BL.shape[1])
    start_B1D, x_BLD = self._embed_at(at_L, tokens_BL, labels_BK)
    if start_B1D is None:  # a classifier has all symbols
      return x_BLD
    return jnp.concatenate([start_B1D, x_BLD[:, :-1]], axis=1)

  def embed_next(
    self, tokens_B: jax.Array, t: jax.Array, labels_BK: Any = None
  ) -> jax.Array:
    """Embeds position t from the symbols at t - 1, ignored at t = 0: x_B1D."""
    before = jnp.reshape(t - 1, 1), tokens_B[:, None]
    start_B1D, x_B1D = self._embed_at(*before, labels_BK)
    return jnp.where(t > 0, x_B1D, start_B1D)

  def _embed_at(self, at_L, tokens_BL, labels_BK):
    """The start, None of a classifier, and symbols with their positions."""
    (b, n), start, places_BL = tokens_BL.shape, self.start, at_L[None]
    for option in options.of(self.config):
      start, places_BL = option.begin(start, places_BL, labels_BK)
    # Gradients are summed over the batch. If it is split, each device has to
    # add its own to the table first, and then sends the table, not [L, D].
    is_split = sharding.size(*sharding.SEQUENCES) > 1
    rows, x_BLD = b if is_split else len(places_BL), self.token(tokens_BL)
    places = jnp.unravel_index(places_BL, self.config.axes or (1,))
    for embed, place_BL in zip(self.position, places, strict=False):
      x_BLD = x_BLD + embed(jnp.broadcast_to(place_BL, (rows, n)))
    if start is None:
      return None, x_BLD
    return jnp.broadcast_to(start[...], (b, 1, x_BLD.shape[2])), x_BLD

  def run_blocks(
    self,
    x_BLD: jax.Array,
    attend: Callable[..., tuple[jax.Array, Any]],
    cache: Any = None,
    rng: jax.Array | None = None,
    first: jax.Array | int = 0,
  ) -> tuple[jax.Array, Any, Measured]:
    """Applies the blocks: (x_BLD, the last cache, what blocks measure).

    `attend` is like `Transformer.attend`, and the first layer's gets `cache`;
    `rng` is the key for dropout, and `first` the first position.
    """
    config = self.config
    rngs = None if rng is None else jax.random.split(rng, config.num_layers)
    stacked: dict[str, Any] = dict(
      rngs=None if rngs is None else jax.vmap(jax.random.split)(rngs),
      options=options.own(config, nnx.to_pure_dict(nnx.state(self))),
    )
    for name in {kind.stack for kind in block_kinds(config)}:
      stacked[name] = stacks.pack(getattr(self, name))

    def apply(x_BLD, cache, layer, index, stacked):
      """(What a block adds to the stream, the cache, what it measures)."""
      # Its parts are taken here, so that a rematerialized block keeps only the
      # inputs of the scan, which are not copied.
      own = stacks.take(config, layer, stacked)
      of_layer = options.Layer(config.patterns[layer], first, own["options"])

      def attend_heads(*qkv):
        inputs = options.prepare(config, of_layer, options.Inputs(*qkv))
        *arrays, keywords = inputs
        out_BLHE, new = attend(cache, layer, index, *arrays, **keywords)
        return out_BLHE, (new, options.measure(config, of_layer, inputs))

      block = own[block_kinds(config)[layer].stack]()
      y_BLD, (new, of_heads), of_mlp = block(x_BLD, attend_heads, own["rngs"])
      return y_BLD, new, of_heads | of_mlp

    apply = rematerialized(apply, config.remat, layer=2)

    def step(carry, *layer):
      x_BLD, cache = carry
      # The rounding errors of a residual stream in bfloat16 would add up. The
      # block reads a copy, which is also what the backward pass keeps.
      y_BLD, cache, new = apply(x_BLD.astype(config.dtype), cache, *layer)
      with jax.named_scope("residual"):
        return (sharding.split_stream(x_BLD + y_BLD), cache), new

    carry = sharding.split_stream(x_BLD), cache
    (x_BLD, cache), measured = stacks.scan(config, step, carry, stacked)
    return x_BLD, cache, measured


def init_params(config: Config, seed: int) -> dict:
  """Draws the initial parameters of a network: nested dicts of arrays."""
  model = Transformer(config, rngs=nnx.Rngs(seed))
  return nnx.to_pure_dict(nnx.state(model))


def bind(config: Config, params: dict) -> Transformer:
  """Returns the network with the given parameters."""
  return nnx.merge(_abstract(config)[0], params)


def make_predict(config: Config) -> Callable[..., tuple[jax.Array, Measured]]:
  """The network as predict(params, rows_BM, rng=None) -> (logits, measured).

  A classifier takes rows of `data.Sequences`, without reading their labels;
  rows of `data.Scans.arrange` have the labels of their scan.
  """

  def predict(params, rows_BM, rng=None):
    rest = rows_BM[:, config.length :]
    told = (rest[:, -1], None) if config.classifies else (None, rest)
    return bind(config, params)(rows_BM[:, : config.length], *told, rng=rng)

  return predict


def make_apply(config: Config) -> Callable[..., jax.Array]:
  """As `make_predict`, but returns the logits alone."""
  predict = make_predict(config)
  return lambda *args, **rng: predict(*args, **rng)[0]


def param_shapes(config: Config) -> dict:
  """The shapes and dtypes of `init_params`, which is not run."""
  return nnx.to_pure_dict(_abstract(config)[1])


def count_parameters(config: Config) -> int:
  """Counts the parameters of a network without allocating them."""
  return sum(x.size for x in jax.tree.leaves(param_shapes(config)))


def count_active_parameters(config: Config) -> int:
  """Counts the parameters that one position uses."""
  leaves = jax.tree_util.tree_leaves_with_path(param_shapes(config))
  return sum(num_active(config, path, x.size) for path, x in leaves)


@functools.lru_cache(maxsize=64)
def _abstract(config):
  """The network, with shapes in place of arrays."""
  network = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.split(network)
