"""Puts sequences on devices: each process reads only those of its own."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Sharding


def place(
  read: Callable[[int], np.ndarray],
  shape: tuple[int, int],
  sharding: Sharding | None,
) -> jax.Array:
  """An array [B, L] on devices.

  Args:
    read: gives row i, [L]. It is called once for each row that a device of
      this process has.
    shape: (B, L).
    sharding: of the array, which splits rows only; None for one device.
  """
  row = functools.cache(read)  # several devices may have the same ones

  def part(index):
    return np.stack([row(i) for i in range(shape[0])[index[0]]])

  if sharding is None:
    return jax.device_put(part((slice(None),)))
  return jax.make_array_from_callback(shape, sharding, part)
