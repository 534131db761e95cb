"""The network of Child et al. 2019, section 5, with any attention patterns."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from sparse_transformer import attention
from sparse_transformer.model import options, sharding, stacks
from sparse_transformer.model.block import DROPPED, rematerialized
from sparse_transformer.model.configure import Config
from sparse_transformer.model.dropout import draw
from sparse_transformer.model.stacks import Measured


class Transformer(nnx.Module):
  """Predicts each symbol from the earlier symbols, or a sequence's label.

  Parameters of blocks and options have a first axis of layers. Parameter shapes
  depend on patterns only if the patterns have parameters themselves. Otherwise,
  a checkpoint can be used with other patterns.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config

    # Inputs are embedded by a table of symbols, a table for each axis of
    # positions, and a start vector.
    embed = functools.partial(nnx.Embed, features=config.width, rngs=rngs)
    normal = nnx.initializers.normal
    self.token = embed(
      config.vocab_size, embedding_init=normal(config.token_std)
    )
    # The standard deviation is such that the sum over axes has that of the
    # config.
    num_axes = max(1, len(config.axes))
    axis_std = config.position_std / math.sqrt(num_axes)
    self.position = nnx.List(
      embed(size, embedding_init=normal(axis_std)) for size in config.axes
    )
    # The start vector comes before the first symbol; a classifier has none.
    start = None
    if not config.classifies:
      drawn_D = jax.random.normal(rngs.params(), (config.width,), jnp.float32)
      start = nnx.Param(config.token_std * drawn_D)
    self.start = start

    # Names of attributes are the names of parameters in checkpoints.
    for stack, blocks in stacks.init(config, rngs).items():
      setattr(self, stack, blocks)

    self.norm = nnx.LayerNorm(config.width, epsilon=1e-6, rngs=rngs)
    # Initial weights are zeros, so an untrained network gives every symbol, or
    # class, the same probability. As in the paper, there is no bias.
    self.logits = nnx.Linear(
      config.width,
      config.outputs,
      use_bias=False,
      kernel_init=nnx.initializers.zeros,
      rngs=rngs,
    )

    # Parameters of options are drawn last, so that they do not change the other
    # parameters.
    for option in options.of(config):
      for name, x in option.init(rngs).items():
        params = jax.tree.map(nnx.Param, x)
        is_tree = isinstance(x, dict)
        setattr(self, name, nnx.Dict(params) if is_tree else params)

  def __call__(
    self,
    tokens_BL: jax.Array,
    sizes_B: jax.Array | None = None,
    order_labels_BO: jax.Array | None = None,
    *,
    rng: jax.Array | None = None,
  ) -> tuple[jax.Array, Measured]:
    """Predicts all positions at once, or the label of each sequence.

    Args:
      tokens_BL: symbols; L is at most `config.length`.
      sizes_B: the number of symbols that a classifier reads, at least 1; None
        for all.
      order_labels_BO: labels of the sequences' orders, see `Option.begin`.
      rng: key for dropout; None applies no dropout.

    Returns:
      (logits in float32, measurements of blocks). The logits_BLV of position t
      are computed from the tokens before t. A classifier returns logits_BC.
    """
    # Segments are the same in all layers.
    segments_BL = self._segments(tokens_BL, sizes_B)
    attend = functools.partial(self.attend, segments_BL=segments_BL)
    x_BLD = self.embed(tokens_BL, order_labels_BO)
    x_BLD, _, measured = self.run_blocks(
      x_BLD, attend, rng=rng, symbols_BL=tokens_BL
    )
    if not self.config.classifies:
      return self.unembed(x_BLD), measured

    # A classifier averages over symbols; padding is in segment 1.
    is_symbol_BL1 = None
    if segments_BL is not None:
      is_symbol_BL1 = (segments_BL == 0)[..., None]
    mean_BD = self.norm(x_BLD).mean(1, where=is_symbol_BL1)
    return self.logits(mean_BD), measured

  def _segments(self, tokens_BL, sizes_B):
    """Returns the segment of each position; None if there is only one.

    Segments are int32 [B, L]. A segment is the index of a document or, in a
    classifier, 0 for symbols and 1 for padding.
    """
    separator = self.config.separator
    if separator is not None:
      # A separator is predicted within the document that it ends. Position t
      # sees the symbols before t, so the position after the separator, whose
      # input is the separator, begins the next document.
      is_end_BL = tokens_BL == separator
      ends_BL = is_end_BL.astype(jnp.int32)
      return jnp.cumsum(ends_BL, axis=1) - ends_BL
    if sizes_B is None:
      return None

    # Padding is a different segment, so that no symbol attends to it.
    at_1L = jnp.arange(tokens_BL.shape[1])[None]
    is_padding_BL = at_1L >= sizes_B[:, None]
    return is_padding_BL.astype(jnp.int32)

  def attend(
    self,
    cache: Any,
    layer: int,
    index: Any,
    inputs: options.Inputs,
    segments_BL: jax.Array | None = None,
  ) -> tuple[jax.Array, Any]:
    """Runs the attention of a layer on all positions.

    `run_blocks` calls this method, or a function with the same arguments that
    uses a cache.

    Args:
      cache: a pytree that passes from layer to layer.
      layer, index: as in `stacks.scan`.
      inputs: inputs of attention.
      segments_BL: segments of positions. A position attends only within its own
        segment.

    Returns:
      (out_BLHE, the unchanged cache).
    """
    # All layers of a scanned group have the same patterns.
    del index
    batch, length = inputs.q_BLHK.shape[:2]
    out_BLHE = attention.attend(
      inputs.q_BLHK,
      inputs.k_BLGK,
      inputs.v_BLGE,
      self.config.patterns[layer],
      backend=self.config.backend,
      tile=self.config.tile,
      spec=sharding.heads(batch, length),
      segments_BL=segments_BL,
      **inputs.keywords,
    )
    return out_BLHE, cache

  # The backward pass stores only the input of the norm.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def unembed(self, x_BLD: jax.Array) -> jax.Array:
    """Computes logits_BLV from the residual stream after the last block.

    The stream, the norm and the logits are float32.
    """
    return self.logits(self.norm(x_BLD))

  def embed(
    self, tokens_BL: jax.Array, order_labels_BO: jax.Array | None = None
  ) -> jax.Array:
    """Embeds symbols as float32 x_BLD, shifted right after a start vector."""
    # Positions are constants of the program, not inputs.
    positions_L = np.arange(tokens_BL.shape[1])
    start_B1D, x_BLD = self._embed_at(positions_L, tokens_BL, order_labels_BO)
    if start_B1D is None:  # a classifier reads all symbols, unshifted
      return x_BLD
    return jnp.concatenate([start_B1D, x_BLD[:, :-1]], axis=1)

  def embed_next(
    self,
    tokens_B: jax.Array,
    t: jax.Array,
    order_labels_BO: jax.Array | None = None,
  ) -> jax.Array:
    """Embeds position t from the symbols at t - 1, as x_B1D.

    At t = 0, the symbols are ignored.
    """
    # The position of the symbols is t - 1. At t = 0, this is -1, and the start
    # replaces the embedding.
    before_L = jnp.reshape(t - 1, 1)
    start_B1D, x_B1D = self._embed_at(
      before_L, tokens_B[:, None], order_labels_BO
    )
    return jnp.where(t > 0, x_B1D, start_B1D)

  def _embed_at(self, positions_L, tokens_BL, order_labels_BO):
    """Adds the embeddings of symbols and of their positions.

    Args:
      positions_L: positions of the symbols in the sequence.
      tokens_BL: the symbols.
      order_labels_BO: labels of the sequences' orders, see `Option.begin`.

    Returns:
      (start [B, 1, D], embedded symbols x_BLD). The start of a classifier is
      None.
    """
    b, n = tokens_BL.shape

    # A place is the index at which a position is embedded. A scan order may
    # change it.
    start = self.start
    places_BL = positions_L[None]
    for option in options.of(self.config):
      start, places_BL = option.begin(start, places_BL, order_labels_BO)

    # Gradients are summed over the batch. If the batch is split, positions are
    # repeated for each sequence, so that each device first adds its gradients
    # to the table, and then exchanges the table instead of [L, D].
    is_split = sharding.size(sharding.SEQUENCES) > 1
    rows = b if is_split else len(places_BL)

    # Sum the vector of each symbol and the vectors of its coordinates.
    x_BLD = self.token(tokens_BL)
    if self.config.axes:
      coordinates = jnp.unravel_index(places_BL, self.config.axes)
      for embed, at_BL in zip(self.position, coordinates, strict=True):
        x_BLD = x_BLD + embed(jnp.broadcast_to(at_BL, (rows, n)))

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
    symbols_BL: jax.Array | None = None,
  ) -> tuple[jax.Array, Any, Measured]:
    """Applies the blocks.

    Args:
      x_BLD: the residual stream, float32.
      attend: a function that is called like `Transformer.attend`.
      cache: the cache that the first layer gets.
      rng: key for dropout; None applies no dropout.
      first: the position in the sequence at which `x_BLD` starts.
      symbols_BL: symbols of whole sequences, which options may read; None if
        unknown.

    Returns:
      (x_BLD, the cache after the last layer, measurements of blocks).
    """
    config = self.config
    kinds = stacks.block_kinds(config)

    # The arrays with a first axis of layers, which the scan splits into
    # periods.
    params = nnx.to_pure_dict(nnx.state(self))
    stacked: dict[str, Any] = dict(options=options.arrays(config, params))
    if rng is not None and config.dropout > 0:
      stacked["keys"] = jax.random.split(rng, config.num_layers)
    for name in {kind.stack for kind in kinds}:
      stacked[name] = stacks.pack(getattr(self, name))

    # The part of a layer that may be rematerialized.
    def apply(x_BLD, cache, layer, index, stacked):
      """Returns (update of the stream, the cache, measurements)."""
      # The layer's parts are taken here, so that a rematerialized block stores
      # only the inputs of the scan, which are not copied.
      parts = stacks.take(config, layer, stacked)
      facts = options.Layer(
        patterns=config.patterns[layer],
        first=first,
        arrays=parts["options"],
        symbols_BL=symbols_BL,
      )

      # The attention of this layer with all options, as the block calls it.
      def attend_heads(q_BLHK, k_BLGK, v_BLGE):
        inputs = options.Inputs(q_BLHK, k_BLGK, v_BLGE)
        inputs = options.prepare(config, facts, inputs)
        out_BLHE, next_cache = attend(cache, layer, index, inputs)
        measured = options.measure(config, facts, inputs)
        return out_BLHE, (next_cache, measured)

      # The masks of both branches are drawn at once, because this is faster to
      # compile.
      words = None
      if "keys" in parts:
        words = draw(parts["keys"], (2, *x_BLD.shape), config.dropout)
        words = checkpoint_name(words, DROPPED)

      block = parts[kinds[layer].stack]()
      y_BLD, rest, measured_by_mlp = block(
        x_BLD,
        attend_heads,
        words,
      )
      next_cache, measured = rest
      return y_BLD, next_cache, measured | measured_by_mlp

    apply = rematerialized(apply, config.remat)

    def step(carry, layer, index, stacked):
      x_BLD, cache = carry
      # The residual stream is float32, because its rounding errors in bfloat16
      # would add up. The block reads a rounded copy, which is also stored for
      # the backward pass.
      rounded_BLD = x_BLD.astype(config.dtype)
      y_BLD, cache, measured = apply(rounded_BLD, cache, layer, index, stacked)
      with jax.named_scope("residual"):
        return (sharding.split_stream(x_BLD + y_BLD), cache), measured

    carry = sharding.split_stream(x_BLD), cache
    (x_BLD, cache), measured = stacks.scan(config, step, carry, stacked)
    return x_BLD, cache, measured


def init_params(config: Config, seed: int) -> dict:
  """Draws the initial parameters of a network.

  Returns:
    Nested dicts of float32 arrays, whose keys are the names of the network's
    attributes. The arrays depend only on the config and the seed.
  """
  model = Transformer(config, rngs=nnx.Rngs(seed))
  return nnx.to_pure_dict(nnx.state(model))


def bind(config: Config, params: dict) -> Transformer:
  """Returns the network with the given parameters."""
  return nnx.merge(_abstract(config)[0], params)


def make_predict(config: Config) -> Callable[..., tuple[jax.Array, Measured]]:
  """Returns the network as a function predict(params, rows_BM, rng=None).

  The function returns (logits, measurements of blocks). For a classifier, rows
  come from `data.Sequences`, and the class labels in these rows are ignored.
  Rows from `Arrangement.arrange` end with the labels of their scan order.
  """

  def predict(params, rows_BM, rng=None):
    network = bind(config, params)

    # A row contains a sequence, followed by other integers about it.
    tokens_BL = rows_BM[:, : config.length]
    rest = rows_BM[:, config.length :]
    if config.classifies:
      return network(tokens_BL, sizes_B=rest[:, -1], rng=rng)
    return network(tokens_BL, order_labels_BO=rest, rng=rng)

  return predict


def make_apply(config: Config) -> Callable[..., jax.Array]:
  """Returns the network as a function that returns only the logits."""
  predict = make_predict(config)

  def apply(params, rows_BM, rng=None):
    logits, _ = predict(params, rows_BM, rng)
    return logits

  return apply


def param_shapes(config: Config) -> dict:
  """Returns the shapes and dtypes of `init_params` without running it."""
  return nnx.to_pure_dict(_abstract(config)[1])


def count_parameters(config: Config) -> int:
  """Counts the parameters of a network without allocating them."""
  return sum(x.size for x in jax.tree.leaves(param_shapes(config)))


def count_active_parameters(config: Config, name: str = "") -> int:
  """Counts the parameters that one position uses.

  With `name`, only parameters of this name are counted. With `name="kernel"`,
  the result is the number of multiplications by weights that one position
  takes.
  """
  # Options define how much of their parameters one position uses.
  total = 0
  for path, x in jax.tree_util.tree_leaves_with_path(param_shapes(config)):
    if name in ("", path[-1].key):
      size = x.size
      for option in options.of(config):
        size = option.num_active(path, size)
      total += size
  return total


@functools.lru_cache(maxsize=64)
def _abstract(config):
  """Splits the network into (structure, shapes of the parameters)."""
  # The seed does not matter, because nothing is drawn.
  network = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.split(network)
