"""Decoding with patterns that follow the content: which keys a step reads.

What is kept says which keys the next query can have. LSH and Routing keep the
last `window` positions of each bucket; TopBlocks the sum of the keys of each
block; AdaptiveSpan nothing. A step turns this into the pairs of one query. They
take the place of those of a whole sequence: the code that combines patterns,
and counts no pair twice, is the same.

Axes: as in `patterns.content`, with G buckets or clusters, W positions kept of
each, S blocks of keys.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import gathered, selection, spans
from sparse_transformer.patterns import AdaptiveSpan, Pattern, shorten
from sparse_transformer.patterns.content import (
  LSH,
  Chosen,
  Content,
  Routing,
  TopBlocks,
)


@dataclasses.dataclass(frozen=True, eq=False)
class _Row(Chosen):
  """Blocks of keys of one query of each head, int32 [B, H, 1, C].

  Attributes:
    bias: what is added to the scores of their keys, [B, H, C * size] or alike.
  """

  bias: jax.Array | float = 0.0

  def mask(self, q, k):
    del q  # there is one only
    return super().mask(0, k)

  @property
  def positions(self) -> jax.Array:
    """Those of the keys [B, H, 1, C * size], negative ones for none."""
    within = np.arange(self.size, dtype=np.int32)[None, None, None, None]
    found = self.blocks[..., None] * self.size + within
    return found.reshape(*self.blocks.shape[:3], -1)


class _State(Protocol):
  """What is kept for one pattern that follows the content.

  Queries and keys are in float32, as in `Content.labels`.
  """

  def init(self, layers: int, batch: int, heads: int, width: int) -> jax.Array:
    """The states of a stack of layers at first; `width` of keys."""
    ...

  def fill(
    self, q_BLHK: jax.Array, k_BLHK: jax.Array, directions: jax.Array | None
  ) -> jax.Array:
    """The state after the positions of a prompt."""
    ...

  def step(
    self,
    stack: jax.Array,
    index: jax.Array | int,
    q_B1HK: jax.Array,
    k_B1HK: jax.Array,
    t: jax.Array,
    directions: jax.Array | None,
  ) -> tuple[jax.Array, tuple[_Row, ...]]:
    """Takes position t in.

    Args:
      stack: the states of a stack of layers after position t - 1.
      index: the layer in the stack.
      q_B1HK, k_B1HK: the query and the key at t.
      t: the position.
      directions: those of the layer.

    Returns:
      (the states with that of this layer after t, the sets whose union are the
      pairs of the query).
    """
    ...


@dataclasses.dataclass(frozen=True)
class _Buckets(_State):
  """The last positions of each bucket: int32 [B, H, R, G, W], -1 for none."""

  pattern: LSH | Routing
  n: int

  @property
  def shape(self) -> tuple[int, int, int]:
    """R, G, W."""
    window = min(self.pattern.window, self.n)
    if isinstance(self.pattern, Routing):
      return 1, self.pattern.clusters, window
    return self.pattern.rounds, self.pattern.buckets, window

  def init(self, layers, batch, heads, width):
    del width
    return jnp.full((layers, batch, heads, *self.shape), -1, jnp.int32)

  def fill(self, q_BLHK, k_BLHK, directions):
    _, num, window = self.shape

    def of_round(labels_L):
      order_L = jnp.argsort(labels_L, stable=True).astype(jnp.int32)
      edges = jnp.arange(num + 1, dtype=labels_L.dtype)
      edges = jnp.searchsorted(labels_L[order_L], edges)
      places_GW = edges[1:, None] - 1 - jnp.arange(window)[None]
      last_GW = jnp.take(order_L, places_GW, mode="clip")
      return jnp.where(places_GW >= edges[:-1, None], last_GW, -1)

    labels_BHLR = self.pattern.labels(q_BLHK, k_BLHK, directions)
    of_head = jax.vmap(of_round, in_axes=1)
    return jax.vmap(jax.vmap(of_head))(labels_BHLR)

  def step(self, stack, index, q_B1HK, k_B1HK, t, directions):
    labels_BHR = self.pattern.labels(q_B1HK, k_B1HK, directions)[:, :, 0]
    b, h, r = np.ogrid[tuple(map(slice, labels_BHR.shape))]
    bucket = index, b, h, r, labels_BHR
    last_BHRW = stack[bucket]
    place_BHR = last_BHRW.argmin(-1)  # of none, or of the earliest
    is_place = jax.nn.one_hot(place_BHR, last_BHRW.shape[-1], dtype=bool)
    keys = jnp.where(is_place, t, last_BHRW)
    if isinstance(self.pattern, LSH):
      # The query attends to itself only where it has no other key.
      is_alone = (last_BHRW < 0).all((2, 3), keepdims=True)
      keys = jnp.where(is_alone & (r[..., None] == 0), keys, last_BHRW)
    rows = tuple(_Row(x[:, :, None], 1) for x in jnp.moveaxis(keys, 2, 0))
    return stack.at[(*bucket, place_BHR)].set(t), rows


@dataclasses.dataclass(frozen=True)
class _BlockSums(_State):
  """The sum of the keys of each block that may be chosen: [B, H, S, K]."""

  pattern: TopBlocks
  n: int

  @property
  def num_blocks(self) -> int:
    return max(1, (self.n - 1) // self.pattern.size)

  def init(self, layers, batch, heads, width):
    shape = layers, batch, heads, self.num_blocks, width
    return jnp.zeros(shape, jnp.float32)

  def fill(self, q_BLHK, k_BLHK, directions):
    del q_BLHK, directions
    b, n, h, width = k_BLHK.shape
    num, size = self.num_blocks, self.pattern.size
    missing = max(0, num * size - n)
    k_BLHK = jnp.pad(k_BLHK, ((0, 0), (0, missing), (0, 0), (0, 0)))
    blocks = k_BLHK[:, : num * size].reshape(b, num, size, h, width)
    return blocks.sum(2).swapaxes(1, 2)

  def step(self, stack, index, q_B1HK, k_B1HK, t, directions):
    del directions
    size = self.pattern.size
    # Nothing is added past the end, where blocks are never chosen.
    stack = stack.at[index, :, :, t // size].add(k_B1HK[:, 0], mode="drop")
    blocks = self.pattern.choose(q_B1HK, stack[index] / size, t[None])
    return stack, (_Row(blocks, size),)


@dataclasses.dataclass(frozen=True)
class _Last(_State):
  """Nothing: the keys are the last ones. Their weights follow from the span."""

  pattern: AdaptiveSpan
  n: int

  def init(self, layers, batch, heads, width):
    return ()

  def fill(self, q_BLHK, k_BLHK, directions):
    return ()

  def step(self, stack, index, q_B1HK, k_B1HK, t, directions):
    b, _, h, _ = q_B1HK.shape
    num_keys = self.pattern.most_keys(self.n)
    distance = np.arange(num_keys, dtype=np.int32)[None, None]
    keys = jnp.broadcast_to((t - distance)[:, :, None], (b, h, 1, num_keys))
    spans_1H1 = directions[None, :, None]
    weights = spans.weights_of(self.pattern, spans_1H1, distance)
    return stack, (_Row(keys, 1, jnp.log(weights)),)


# What is kept for which patterns.
_STATES: tuple[tuple[Any, Callable[[Any, int], _State]], ...] = (
  (LSH | Routing, _Buckets),
  (TopBlocks, _BlockSums),
  (AdaptiveSpan, _Last),
)


def _state_of(content: Content, n: int) -> _State:
  """What is kept for a pattern in sequences of n positions."""
  for kinds, state in _STATES:
    if isinstance(content, kinds):
      return state(content, n)
  raise ValueError(
    f"{shorten(content)} cannot be decoded with a cache: `content_cache` does"
    " not define what to keep for it; sample with --nocache"
  )


def can_decode(pattern: Pattern) -> bool:
  """Whether it is known what to keep for all that a pattern contains."""
  return all(
    any(isinstance(content, kinds) for kinds, _ in _STATES)
    for content in pattern.contents()
  )


def take_heads(
  directions: selection.Directions, heads: np.ndarray
) -> selection.Directions:
  """The directions of some heads."""
  return {c: x if len(x) == 1 else x[heads] for c, x in directions.items()}


def init(
  pattern: Pattern, n: int, layers: int, batch: int, heads: int, width: int
) -> list[jax.Array]:
  """The states of each of a pattern's `contents` at first.

  Args:
    pattern: of all heads.
    n: positions of a sequence.
    layers, batch, heads: of a stack of layers.
    width: of keys, K.
  """
  shape = layers, batch, heads, width
  return [_state_of(content, n).init(*shape) for content in pattern.contents()]


def num_bytes(pattern: Pattern, n: int, width: int) -> int:
  """The size of the states of one head of one layer, beside keys and values."""
  states = jax.eval_shape(lambda: init(pattern, n, 1, 1, 1, width))
  return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))


def fill(
  pattern: Pattern,
  n: int,
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  directions: selection.Directions,
) -> list[jax.Array]:
  """The states of one layer after a prompt.

  Args:
    pattern: of all heads.
    n: positions of a sequence.
    q_BLHK, k_BLHK: queries and keys of the prompt.
    directions: as in `attention.attend`.
  """
  q_BLHK, k_BLHK = (x.astype(jnp.float32) for x in (q_BLHK, k_BLHK))
  return [
    _state_of(content, n).fill(q_BLHK, k_BLHK, directions.get(content))
    for content in pattern.contents()
  ]


def step(
  pattern: Pattern,
  n: int,
  stacks: list[jax.Array],
  index: jax.Array | int,
  q_B1HK: jax.Array,
  k_B1HK: jax.Array,
  t: jax.Array,
  directions: selection.Directions,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
  """Takes position t in and finds the keys of its query.

  Args:
    pattern: of all heads.
    n: positions of a sequence.
    stacks: the states of a stack of layers after position t - 1.
    index: the layer in the stack.
    q_B1HK, k_B1HK: the query and the key at t.
    t: the position.
    directions: as in `attention.attend`.

  Returns:
    (the states after t in this layer, positions [B, H, R] of keys beside those
    of the static part of the pattern, what is added to their scores [B, H, R]:
    -inf for padding). No key occurs twice.
  """
  q_B1HK, k_B1HK = (x.astype(jnp.float32) for x in (q_B1HK, k_B1HK))
  t = jnp.asarray(t, jnp.int32)
  new, sets = [], []
  for content, stack in zip(pattern.contents(), stacks, strict=True):
    given = directions.get(content)
    stack, rows = _state_of(content, n).step(
      stack, index, q_B1HK, k_B1HK, t, given
    )
    new.append(stack)
    sets.append(rows)
  keys, biases = [], []
  for part in selection.parts_of(pattern, tuple(sets)):
    row = gathered.pairs_of(part)
    assert isinstance(row, _Row)
    k_BH1R = row.positions
    real_BH1R = (k_BH1R >= 0) & gathered.condition(part).mask(t, k_BH1R)
    keys.append(k_BH1R[:, :, 0])
    biases.append(jnp.where(real_BH1R[:, :, 0], row.bias, -jnp.inf))
  return new, jnp.concatenate(keys, -1), jnp.concatenate(biases, -1)
