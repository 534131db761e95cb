"""Heads with the same pattern run together; key heads may serve several.

A tuple of heads lists their numbers; None stands for all of them. Query head h
has key head h // group.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention.contract import Heads
from sparse_transformer.patterns import Pattern


def index_of(heads: Heads) -> slice | np.ndarray:
  """An index of heads; a slice for all of them, so that nothing is copied."""
  return slice(None) if heads is None else np.array(heads)


def key_heads(heads: Heads, group: int) -> Heads:
  """The key heads of some query heads, each for equally many in a row.

  One occurs several times if only some of its query heads are among them.

  >>> key_heads((0, 1, 2, 3), 2), key_heads((0, 1, 2), 2)
  ((0, 1), (0, 0, 1))
  """
  if heads is None or group == 1:
    return heads
  of_each = np.array(heads) // group
  for size in range(group, 0, -1):
    if len(heads) % size == 0:
      rows = of_each.reshape(-1, size)
      if (rows == rows[:, :1]).all():
        break
  return tuple(rows[:, 0].tolist())


@functools.lru_cache(maxsize=256)
def heads_of_parts(
  patterns: tuple[Pattern, ...], n: int
) -> tuple[tuple[Pattern, Heads], ...]:
  """Each distinct part that has pairs, with the heads that use it."""
  by_part = group_heads([pattern.parts() for pattern in patterns])
  return tuple(item for item in by_part.items() if item[0].pairs(n))


def group_heads(
  patterns_H: Sequence[Sequence[Pattern]],
) -> dict[Pattern, Heads]:
  """Each distinct pattern, with the heads that have it among theirs."""
  heads: dict[Pattern, list[int]] = {}
  for head, patterns in enumerate(patterns_H):
    for pattern in patterns:
      heads.setdefault(pattern, []).append(head)
  everyone = list(range(len(patterns_H)))
  return {
    pattern: None if found == everyone else tuple(found)
    for pattern, found in heads.items()
  }


def put_heads(x_BLH: jax.Array, heads: Heads, new_BLH: jax.Array) -> jax.Array:
  """x, with the results of heads in their places."""
  if heads is None:  # without a scatter, whose indices would be empty
    return new_BLH.astype(x_BLH.dtype)
  return x_BLH.at[:, :, index_of(heads)].set(new_BLH)


def add_heads(x_BLH: jax.Array, heads: Heads, new_BLH: jax.Array) -> jax.Array:
  """x, with the results of heads added to it, in an order that is fixed."""
  if heads is None:
    return x_BLH + new_BLH
  # A head that occurs several times: a sum has an order, a scatter may not.
  distinct = dict.fromkeys(heads)
  if len(distinct) < len(heads):
    of_each = [np.equal(heads, head).nonzero()[0] for head in distinct]
    new_BLH = jnp.stack([new_BLH[:, :, at].sum(2) for at in of_each], 2)
  return x_BLH.at[:, :, np.array([*distinct])].add(new_BLH)
