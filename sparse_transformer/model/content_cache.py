"""Decoding with patterns that follow the content: which keys a step reads.

Beside keys and values, what is kept is the position in each slot of the cache
and the labels of all positions. A step adds the labels of the next position,
binds the pattern to all of them, and its mask says which slots it reads.

Axes: as in `patterns.content`, with S for slots.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import selection, spans as spans_lib
from sparse_transformer.patterns import Pattern
from sparse_transformer.patterns.catalogue import Causal
from sparse_transformer.patterns.content import Content


def kept(pattern: Pattern) -> Pattern:
  """The pairs for which keys are kept: labels may depend on all before."""
  return Causal() if _contents(pattern) else pattern.support()


def _contents(pattern: Pattern) -> tuple[Content, ...]:
  """What a pattern contains that has labels."""
  return pattern.contents() if selection.follows(pattern) else ()


def take_heads(
  directions: selection.Directions, heads: np.ndarray
) -> selection.Directions:
  """The directions of some heads."""
  return {c: x if len(x) == 1 else x[heads] for c, x in directions.items()}


def init(
  pattern: Pattern, n: int, shape: tuple[int, int, int], size: int, width: int
) -> list[jax.Array]:
  """The states at first: the position in each slot, -1 for none, and labels.

  Args:
    pattern: of all heads.
    n: positions of a sequence.
    shape: layers, batch and heads of a stack of layers.
    size: number of slots.
    width: of keys, K.

  Returns:
    int32 [layers, S] and, for each content with labels, int32 [layers, B, H, n,
    C]; nothing for static patterns.
  """
  if not pattern.contents():
    return []

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  def num_labels(content):
    directions = array(1, content.num_directions, width)
    q, k = array(1, 1, 1, width), array(1, n, 1, width)
    return jax.eval_shape(content.labels, q, k, directions).shape[-1]

  return [
    jnp.full((shape[0], size), -1, jnp.int32),
    *(
      jnp.zeros((*shape, n, num_labels(content)), jnp.int32)
      for content in _contents(pattern)
    ),
  ]


def num_bytes(pattern: Pattern, n: int, width: int) -> int:
  """The size of the labels of one head of one layer."""
  states = jax.eval_shape(lambda: init(pattern, n, (1, 1, 1), 0, width))
  return sum(x.size * x.dtype.itemsize for x in states)


def fill(
  pattern: Pattern,
  states: list[jax.Array],
  index: jax.Array | int,
  held_S: np.ndarray,
  q_BLHK: jax.Array,
  k_BLHK: jax.Array,
  directions: selection.Directions,
) -> list[jax.Array]:
  """The states after a prompt in one layer.

  Args:
    pattern: of all heads.
    states: of a stack of layers.
    index: the layer in the stack.
    held_S: the position in each slot, at least L for none.
    q_BLHK, k_BLHK: queries and keys of the prompt.
    directions: as in `attention.attend`.
  """
  if not states:
    return []
  at, *labels = states
  stop = q_BLHK.shape[1]
  at = at.at[index].set(jnp.where(held_S < stop, held_S, -1))
  for i, content in enumerate(_contents(pattern)):
    missing = labels[i].shape[3] - stop
    k_BMHK = jnp.pad(k_BLHK, ((0, 0), (0, missing), (0, 0), (0, 0)))
    new = selection.labels(content, q_BLHK, k_BMHK, directions.get(content))
    labels[i] = labels[i].at[index, :, :, :stop].set(new)
  return [at, *labels]


def step(
  pattern: Pattern,
  states: list[jax.Array],
  index: jax.Array | int,
  t: jax.Array,
  slot: jax.Array,
  q_B1HK: jax.Array,
  k_BHSK: jax.Array,
  directions: selection.Directions,
) -> tuple[list[jax.Array], jax.Array]:
  """Takes position t in and finds the keys of its query.

  Args:
    pattern: of all heads.
    states: of a stack of layers after position t - 1.
    index: the layer in the stack.
    t: the position.
    slot: where its key is kept.
    q_B1HK: its queries.
    k_BHSK: the keys in the slots of the layer, that at t included.
    directions: as in `attention.attend`.

  Returns:
    (the states after t in this layer, what is added to the scores of the keys
    in the slots [B, H, S]: -inf for those that the query does not have).
  """
  at, *labels = states
  at = at.at[index, slot].set(t)
  for i, content in enumerate(_contents(pattern)):  # a slot for each position
    k_BMHK = k_BHSK[:, :, : labels[i].shape[3]].swapaxes(1, 2)
    given = directions.get(content)
    new = selection.labels(content, q_B1HK, k_BMHK, given, start=t)
    labels[i] = labels[i].at[index, :, :, t].set(new[:, :, 0])
  bound = selection.bind_labels(pattern, [x[index] for x in labels])
  k_at = at[index].reshape(1, 1, 1, -1)
  mask = bound.mask(jnp.reshape(t, (1, 1, 1, 1)), k_at) & (k_at >= 0)
  bias = jnp.where(mask, 0.0, -jnp.inf)[:, :, 0]
  heads = (pattern,) * q_B1HK.shape[2]
  spans_H = spans_lib.of_heads(heads, directions, bias.dtype)
  if spans_H is not None:
    weights_HS = spans_lib.weights(heads, spans_H, t, at[index])
    bias = bias + jnp.log(weights_HS)[None]
  return [at, *labels], bias
