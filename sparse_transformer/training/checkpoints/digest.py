"""Digests of arrays, equal however the arrays are split over devices."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sparse_transformer.training.distributed import processes


def of_arrays(tree: Any) -> dict[str, str]:
  """{path: digest, 16 hexadecimal digits} of all arrays of a pytree.

  Each device sums over its own part, and only the sums leave it.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  sums = processes.fetch(_sums([x for _, x in leaves]))
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): f"{a:08x}{b:08x}"
    for (path, _), (a, b) in zip(leaves, sums, strict=True)
  }


@jax.jit
def _sums(arrays):
  return jnp.stack([_sum(x) for x in arrays])


def _sum(x):
  """Two sums over an array's bits, each mixed with its place: uint32 [2].

  Sums modulo 2**32 do not depend on their order.
  """
  bits = _bits(x)
  place = jnp.zeros(bits.shape, jnp.uint32)
  for axis, size in enumerate(bits.shape):
    place = place * jnp.uint32(size)
    place += lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
  weight = _mix(place) | 1  # odd: any change of the bits changes the product
  first = (bits * weight).sum(dtype=jnp.uint32)
  return jnp.stack([first, _mix(bits ^ weight).sum(dtype=jnp.uint32)])


def _bits(x):
  """The bits of an array: uint32, with an axis of two for types of 64 bits."""
  x = jnp.asarray(x)
  if x.dtype == bool:
    x = x.astype(jnp.uint8)
  kind = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
  return lax.bitcast_convert_type(x, kind).astype(jnp.uint32)


def _mix(x):
  """A permutation of 32-bit integers that spreads each bit over all others.

  Source: Wellons 2018, nullprogram.com/blog/2018/07/31, "lowbias32".
  """
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
