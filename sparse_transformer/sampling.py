"""Draws sequences from a trained model.

python -m sparse_transformer.sample is the command; this is what it calls.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax


def sample(apply, params, *, num, length, temperature=1.0, seed=0):
  """Draws `num` sequences: uint8 [num, length].

  Position by position, each from a pass over the whole sequence: the plainest
  correct way, at the cost of `length` passes. temperature divides the logits;
  0 takes the most probable symbol.
  """
  if num < 1:
    raise ValueError(f"{num=} sequences: at least 1")
  if temperature < 0:
    raise ValueError(f"{temperature=} must be 0 or more")
  keys = jax.random.split(jax.random.key(seed), length)
  draw = functools.partial(_draw, apply, temperature=temperature)
  return jax.jit(draw)(params, jnp.zeros((num, length), jnp.uint8), keys)


def _draw(apply, params, tokens_BL, keys, *, temperature):
  def step(t, tokens_BL):
    logits_BLV = apply(params, tokens_BL)
    logits_BV = lax.dynamic_index_in_dim(logits_BLV, t, axis=1, keepdims=False)
    if temperature:
      new_B = jax.random.categorical(keys[t], logits_BV / temperature)
    else:
      new_B = logits_BV.argmax(-1)
    return tokens_BL.at[:, t].set(new_B.astype(tokens_BL.dtype))

  return lax.fori_loop(0, tokens_BL.shape[1], step, tokens_BL)
