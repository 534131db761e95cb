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
from sparse_transformer.model import experts, pattern_params, sharding
from sparse_transformer.model.block import ExpertBlock, ResidualBlock
from sparse_transformer.model.hyperparameters import Config

# What blocks measure: {name: [blocks that have it, ...]}. Scalars of a block
# are auxiliary losses; longer values are for the log.
Measured = dict[str, jax.Array]

# The parts of the parameters that are stacked along layers, and the layers
# within blocks that are stacked along experts.
STACKED = {"blocks", "expert_blocks", "centroids", pattern_params.SPANS}
STACKED |= {"sinks"}
STACKED |= {"experts_in", "experts_out"}


class Transformer(nnx.Module):
  """Predicts each symbol of a sequence from those before it, or a label.

  Its only state is its parameters. The parameters of all blocks are stacked
  along a leading axis of layers; blocks with experts have their own stack. No
  shape depends on the patterns, so a checkpoint can be used with other
  patterns, except those with parameters of their own: `Routing` has centroids
  for all layers and heads and each number of clusters, `AdaptiveSpan` spans.
  """

  def __init__(self, config: Config, *, rngs: nnx.Rngs):
    self.config = config
    token_std, position_std = config.token_std, config.position_std
    if config.init == "paper":
      token_std = position_std = 0.125 / math.sqrt(config.width)
    position_std /= math.sqrt(len(config.axes))
    embed = functools.partial(nnx.Embed, features=config.width, rngs=rngs)
    self.token = embed(
      config.vocab_size, embedding_init=nnx.initializers.normal(token_std)
    )
    self.position = nnx.List(
      embed(size, embedding_init=nnx.initializers.normal(position_std))
      for size in self._position_axes
    )
    draw = lambda: jax.random.normal(rngs.params(), (config.width,))
    has_start = not config.classifies or config.prepends
    self.start = nnx.Param(token_std * draw()) if has_start else None
    kinds = config.has_experts
    self.blocks = _stack(ResidualBlock, config, kinds.count(False), rngs)
    self.expert_blocks = _stack(ExpertBlock, config, kinds.count(True), rngs)
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
    drawn = pattern_params.init_centroids(config, rngs.params())
    centroids = {name: nnx.Param(x) for name, x in drawn.items()}
    self.centroids = nnx.Dict(centroids) if centroids else None
    spans = pattern_params.init_spans(config)
    self.spans = None if spans is None else nnx.Param(spans)
    of_heads = config.num_layers, config.num_heads
    self.sinks = nnx.Param(jnp.zeros(of_heads)) if config.sinks else None

  @property
  def _position_axes(self):
    """The sizes of the tables of position embeddings."""
    return self.config.axes if self.config.positions == "learned" else ()

  def __call__(
    self,
    tokens_BL: jax.Array,
    sizes_B: jax.Array | None = None,
    *,
    rng: jax.Array | None = None,
  ) -> tuple[jax.Array, Measured]:
    """Predicts all positions at once, or the label of each sequence.

    Args:
      tokens_BL: symbols, of any integer dtype; L is at most
        `config.num_symbols`.
      sizes_B: of a classifier, how many symbols each sequence has, from 1 to L;
        those after them change nothing. None for all.
      rng: key for dropout; None applies no dropout.

    Returns:
      (logits_BLV in float32, of which those of position t depend only on tokens
      before t, or logits_BC of a classifier; what blocks measure, for
      training).
    """
    x_BLD, segments_BL = self.embed(tokens_BL), None
    if sizes_B is not None:
      # Padding is another segment, so that no symbol attends to it.
      at_L = jnp.arange(x_BLD.shape[1]) - self.config.prepends
      segments_BL = (at_L[None] >= sizes_B[:, None]).astype(jnp.int32)
    if (separator := self.config.separator) is not None:
      # Position t sees the symbols before t: a separator begins a document.
      ends_BL = (tokens_BL == separator).astype(jnp.int32)
      segments_BL = jnp.cumsum(ends_BL, axis=1) - ends_BL
    attend = functools.partial(self.attend, segments_BL=segments_BL)
    x_BLD, _, measured = self.run_blocks(x_BLD, attend, rng=rng)
    if self.config.classifies:
      return self.classify(x_BLD, segments_BL), measured
    return self.unembed(x_BLD), measured

  def attend(
    self,
    cache: Any,
    layer: int,
    index: jax.Array | int,
    directions: pattern_params.Directions,
    q_BLHK: jax.Array,
    k_BLGK: jax.Array,
    v_BLGE: jax.Array,
    **options: Any,
  ) -> tuple[jax.Array, Any]:
    """Attention of one layer, over whole sequences.

    Args:
      cache: a pytree that is passed from layer to layer with the same
        structure, shapes and dtypes; None where nothing is cached.
      layer: the first layer of the stack, see `stacks`; determines patterns.
      index: the position in the stack; traced, since stacks are scanned.
      directions, q_BLHK, k_BLGK, v_BLGE: of this layer, see `attention.attend`.
        In heads whose pattern `shares`, keys are the queries at unit length.
      options: `sinks_H` and `segments_BL`, likewise.

    Returns:
      (out_BLHE in the dtype of the values, the new cache: here, the same).
    """
    del index  # layers of one stack have the same patterns
    out_BLHE = attention.attend(
      q_BLHK,
      k_BLGK,
      v_BLGE,
      self.config.patterns[layer],
      **options,
      backend=self.config.backend,
      tile=self.config.tile,
      directions=directions,
      spec=sharding.heads(*q_BLHK.shape[:2]),
    )
    return out_BLHE, cache

  # The backward pass needs the norm's input only.
  @functools.partial(jax.checkpoint, prevent_cse=False)
  def unembed(self, x_BLD: jax.Array) -> jax.Array:
    """Predicts from the residual stream after the last block: logits_BLV."""
    return self.logits(self.norm(x_BLD))

  def classify(
    self, x_BLD: jax.Array, segments_BL: jax.Array | None
  ) -> jax.Array:
    """Predicts labels from the positions of segment 0: logits_BC."""
    if self.config.pool == "first":
      return self.unembed(x_BLD[:, :1])[:, 0]
    x_BLD = self.norm(x_BLD)
    is_valid = None if segments_BL is None else (segments_BL == 0)[..., None]
    return self.logits(x_BLD.mean(1, where=is_valid))

  def embed(self, tokens_BL: jax.Array) -> jax.Array:
    """Embeds symbols as float32 x_BLD, shifted right by one after the start.

    A classifier has all of them: after the start if it predicts from there, and
    otherwise without.

    Raises:
      ValueError: if there are more tokens than positions.
    """
    (b, n), d = tokens_BL.shape, self.config.width
    if n > self.config.num_symbols:
      raise ValueError(
        f"{n} tokens, but the network has {self.config.num_symbols} positions;"
        " cut the sequence or configure a longer one"
      )
    places = np.unravel_index(np.arange(n), self._position_axes or (n,))
    x_BLD = self.token(tokens_BL)
    # Gradients are summed over the batch. If it is split, each device has to
    # add its own to the table first, and then sends the table, not [L, D].
    rows = b if sharding.size(*sharding.SEQUENCES) > 1 else 1
    for embed, place_L in zip(self.position, places, strict=False):
      x_BLD = x_BLD + embed(jnp.broadcast_to(place_L, (rows, n)))
    if self.start is None:
      return x_BLD
    start_B1D = jnp.broadcast_to(self.start[...], (b, 1, d))
    rest = x_BLD if self.config.prepends else x_BLD[:, :-1]
    return jnp.concatenate([start_B1D, rest], axis=1)

  def embed_next(self, tokens_B: jax.Array, t: jax.Array) -> jax.Array:
    """Embeds position t from the symbols at t - 1, ignored at t = 0: x_B1D."""
    assert self.start is not None  # only generators decode
    x_BD = self.token(tokens_B)
    places = jnp.unravel_index(t - 1, self.config.axes)
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
    """Applies the blocks.

    Scans over the periods of patterns and MLPs, so that the compiled program
    does not grow with depth, and then applies the remaining layers.

    Args:
      x_BLD: embedded symbols, from `embed` or `embed_next`.
      attend: attention of each layer, like `attend`; may change the cache.
      cache: the cache that is passed to the first layer.
      rng: key for dropout; None applies no dropout.
      first: the first position.

    Returns:
      (x_BLD and the cache after the last block, what blocks measure).
    """
    x_BLD = sharding.split_stream(x_BLD)
    config, period = self.config, self.config.period
    inputs, make_block = self._inputs(rng)
    apply: Callable = functools.partial(
      self._apply_block, attend, make_block, first
    )
    apply = _rematerialize(apply, config.remat)

    def apply_layers(carry, layers, index, inputs):
      (x_BLD, cache), measured = carry, []
      for layer in layers:
        # The rounding errors of a residual stream in bfloat16 would add up. The
        # block reads a copy, which is also what the backward pass keeps.
        y_BLD, cache, new = apply(
          x_BLD.astype(config.dtype), cache, layer, index, inputs
        )
        with jax.named_scope("residual"):
          x_BLD = sharding.split_stream(x_BLD + y_BLD)
        measured.append(new)
      return (x_BLD, cache), measured

    def apply_period(carry, inputs):
      return apply_layers(carry, range(period), *inputs)

    times = config.num_layers // period
    carry, scanned = jax.lax.scan(
      apply_period, (x_BLD, cache), (jnp.arange(times), self._by_period(inputs))
    )
    rest = range(times * period, config.num_layers)
    (x_BLD, cache), last = apply_layers(carry, rest, 0, inputs)
    return x_BLD, cache, _by_layer(scanned, last)

  def _inputs(self, rng):
    """(inputs of blocks besides the stream, makers of blocks by `has_experts`).

    Inputs [layers, ...]: parameters by `has_experts`, of patterns; random keys.
    """
    rngs = None
    if rng is not None:
      rngs = jax.random.split(rng, self.config.num_layers)
      rngs = jax.vmap(jax.random.split)(rngs)  # two for each layer
    packed, make_block = {}, {}
    for kind, blocks in ((False, self.blocks), (True, self.expert_blocks)):
      if blocks is not None:
        packed[kind], make_block[kind] = _pack(blocks)
    sinks = None if self.sinks is None else self.sinks[...]
    return (packed, self.learned, sinks, rngs), make_block

  @property
  def learned(self) -> pattern_params.Learned:
    """The parameters of patterns, of all layers."""
    centroids: Any = self.centroids or {}
    spans = None if self.spans is None else self.spans[...]
    return {num: param[...] for num, param in centroids.items()}, spans

  def _by_period(self, inputs):
    """The inputs of full periods, as arrays [periods, layers of one, ...]."""
    period = self.config.period
    times = self.config.num_layers // period
    kinds = self.config.has_experts[:period]
    of_kinds = {kind: kinds.count(kind) for kind in inputs[0]}
    counts = of_kinds, period, period, period

    def split(count, tree):
      return jax.tree.map(
        lambda p: p[: times * count].reshape(times, count, *p.shape[1:]), tree
      )

    return jax.tree.map(split, counts, inputs)

  def _apply_block(
    self, attend, make_block, first, x_BLD, cache, layer, index, inputs
  ):
    """(What a block adds to the stream, the cache, what it measures)."""
    # The layer is taken here, so that a rematerialized block keeps only the
    # inputs of the scan, which are not copied.
    packed, learned, sinks, rngs = inputs
    config = self.config
    *before, kind = config.has_experts[: layer + 1]
    block = make_block[kind](experts.take(packed[kind], before.count(kind)))
    heads = config.patterns[layer]
    layers = layer + config.period * np.arange(stacks(config)[layer])
    directions = pattern_params.directions(
      heads,
      layers.tolist(),
      index,
      experts.take(learned, layer),
      config.qk_width // config.num_heads,
    )

    options = {}
    if sinks is not None:
      options["sinks_H"] = experts.take(sinks, layer)

    def attend_heads(q_BLHK, k_BLGK, v_BLGE):
      k_BLGK = pattern_params.share(heads, q_BLHK, k_BLGK)
      if config.rotates(layer):
        at_L = first + jnp.arange(q_BLHK.shape[1])
        q_BLHK = rotate(q_BLHK, at_L, config.rotary_base)
        k_BLGK = rotate(k_BLGK, at_L, config.rotary_base)
      inputs = q_BLHK, k_BLGK, v_BLGE
      out_BLHE, new = attend(
        cache, layer, index, directions, *inputs, **options
      )
      return out_BLHE, (new, pattern_params.measure(heads, q_BLHK, directions))

    y_BLD, (cache, of_heads), of_mlp = block(
      x_BLD, attend_heads, experts.take(rngs, layer)
    )
    return y_BLD, cache, of_heads | of_mlp


def rotate(x_BLHK: jax.Array, at_L: jax.Array, base: float) -> jax.Array:
  """Rotary positions: number i of a head and number i + K / 2 are a pair.

  Source: Su et al. 2021, arXiv 2104.09864; they pair neighbors.
  """
  half = x_BLHK.shape[-1] // 2
  rates = base ** (-np.arange(half, dtype=np.float32) / half)
  angles_LK = at_L.astype(jnp.float32)[:, None] * rates[None]
  cos, sin = (f(angles_LK)[None, :, None] for f in (jnp.cos, jnp.sin))
  x, y = jnp.split(x_BLHK.astype(jnp.float32), 2, -1)
  rotated = jnp.concatenate([x * cos - y * sin, y * cos + x * sin], -1)
  return rotated.astype(x_BLHK.dtype)


def _rematerialize(apply: Callable, remat: str) -> Callable:
  """Makes the backward pass recompute a block, as far as `remat` says."""
  if remat not in ("block", "block_but_attention"):
    return apply
  # With the outputs of attention saved, its backward pass needs only the
  # queries, keys and values, which are cheap to recompute.
  names = attention.SAVED_NAMES if remat == "block_but_attention" else ()
  names = *names, *pattern_params.SAVED_NAMES, *experts.SAVED_NAMES
  return jax.checkpoint(
    apply,
    prevent_cse=False,
    static_argnums=2,  # layer
    policy=jax.checkpoint_policies.save_only_these_names(*names),
  )


def _pack(blocks: nnx.Module) -> tuple[Any, Callable]:
  """(parameters of a stack of blocks, function from those of one to the block).

  A scan copies a layer out of each array, and its gradient into another: two
  launches each on GPUs. Therefore all vectors become one array.
  """
  graph, params = nnx.split(blocks)
  leaves, structure = jax.tree.flatten(params)
  is_matrix = [leaf.ndim > 2 for leaf in leaves]
  matrices = [x for x in leaves if x.ndim > 2]
  vectors = [x for x in leaves if x.ndim == 2]
  ends = np.cumsum([x.shape[1] for x in vectors])[:-1]

  def make_block(packed):
    matrices, vectors = packed
    vectors = map(sharding.keep_whole, jnp.split(vectors, ends, axis=-1))
    # Without a barrier, the compiler for GPUs would not add a bias, which is a
    # slice, in the kernel of a product.
    vectors = jax.lax.optimization_barrier(list(vectors))
    kinds = iter(vectors), iter(matrices)
    params = [next(kinds[k]) for k in is_matrix]
    return nnx.merge(graph, jax.tree.unflatten(structure, params))

  return (matrices, jnp.concatenate(vectors, axis=1)), make_block


def _by_layer(scanned: list[Measured], last: list[Measured]) -> Measured:
  """Joins what scanned layers [periods, ...] and the last ones measured."""
  measured = {}
  for name in sorted({name for layer in scanned for name in layer}):
    of_periods = jnp.stack([x[name] for x in scanned if name in x], axis=1)
    rest = [x[name][None] for x in last if name in x]
    measured[name] = jnp.concatenate(
      [of_periods.reshape(-1, *of_periods.shape[2:]), *rest]
    )
  return measured


def stacks(config: Config) -> dict[int, int]:
  """The layers that run as one stack: {first layer: number of layers}.

  The layers at the same place of each period of the patterns form a stack;
  those after the last full period are stacks of one.
  """
  times, rest = divmod(config.num_layers, config.period)
  last = range(config.num_layers - rest, config.num_layers)
  return dict.fromkeys(range(config.period), times) | dict.fromkeys(last, 1)


def _stack(
  block: type[ResidualBlock], config: Config, count: int, rngs: nnx.Rngs
) -> ResidualBlock | None:
  """Blocks whose parameters are stacked; None for no blocks."""
  if not count:
    return None
  split = nnx.split_rngs(splits=count)
  return split(nnx.vmap(lambda rngs: block(config, rngs=rngs)))(rngs)


def init_params(config: Config, seed: int) -> dict:
  """Draws the initial parameters of a network: nested dicts of arrays."""
  model = Transformer(config, rngs=nnx.Rngs(seed))
  return nnx.to_pure_dict(nnx.state(model))


def bind(config: Config, params: dict) -> Transformer:
  """Returns the network with the given parameters."""
  return nnx.merge(_abstract(config)[0], params)


def make_apply(config: Config) -> Callable[..., jax.Array]:
  """The network as apply(params, tokens_BL, rng=None) -> logits_BLV.

  A classifier is apply(params, rows_BM, rng=None) -> logits_BC, with rows as
  `data.Sequences` has them; their labels are not read.
  """
  return lambda *args, **rng: make_predict(config)(*args, **rng)[0]


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
  leaves = jax.tree.leaves(param_shapes(config))
  return sum(math.prod(x.shape) for x in leaves)


def count_active_parameters(config: Config) -> int:
  """Counts the parameters that a position uses: of experts, the chosen ones."""
  params = param_shapes(config)
  idle = config.experts - config.experts_per_token
  return count_parameters(config) - sum(
    math.prod(x.shape) * idle // config.experts
    for path, x in jax.tree_util.tree_leaves_with_path(params)
    if num_stacks(path) == 2
  )


def num_stacks(path: tuple[Any, ...]) -> int:
  """Number of axes along which the parameter at a path is stacked."""
  return len(STACKED & {key.key for key in path})


@functools.lru_cache(maxsize=64)
def _abstract(config: Config) -> tuple[nnx.GraphDef, nnx.State]:
  """The network, with shapes in place of arrays."""
  network = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
  return nnx.split(network)
