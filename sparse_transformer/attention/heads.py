"""Heads with the same pattern run together; key heads may serve several.

Query head h has key head h // group: grouped-query attention (Ainslie et al.
2023, arXiv 2305.13245), with multi-head and multi-query attention as its ends.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention.contract import Heads, Request
from sparse_transformer.patterns import Pattern


def index_of(heads: Heads, num_heads: int) -> slice | np.ndarray:
  """An index of heads; a slice for all of them, so that nothing is copied."""
  if heads == tuple(range(num_heads)):
    return slice(None)
  return np.array(heads)


def key_heads(heads: Heads, group: int) -> Heads:
  """The key heads of some query heads, each for equally many in a row.

  One occurs several times if only some of its query heads are among them.

  >>> key_heads((0, 1, 2, 3), 2), key_heads((0, 1, 2), 2)
  ((0, 1), (0, 0, 1))
  """
  shared = np.array(heads) // group

  # The most query heads in a row that each of their key heads may serve. One
  # query head each is always possible.
  for size in range(group, 0, -1):
    if len(heads) % size == 0:
      rows = shared.reshape(-1, size)
      firsts = rows[:, 0]
      if (rows == firsts[:, None]).all():
        break
  return tuple(firsts.tolist())


def request_of(request: Request, pattern: Pattern, heads: Heads) -> Request:
  """The request of some heads alone, all of which get the same pattern."""
  return dataclasses.replace(
    request,
    patterns=(pattern,) * len(heads),
    num_key_heads=len(key_heads(heads, request.group)),
  )


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
  heads: dict[Pattern, Heads] = {}
  for head, patterns in enumerate(patterns_H):
    for pattern in patterns:
      heads[pattern] = (*heads.get(pattern, ()), head)
  return heads


def put_heads(x_BLH: jax.Array, heads: Heads, new_BLH: jax.Array) -> jax.Array:
  """x, with the results of heads in their places, in its own dtype."""
  index = index_of(heads, x_BLH.shape[2])
  if isinstance(index, slice):  # a scatter would have empty indices
    return new_BLH.astype(x_BLH.dtype)
  return x_BLH.at[:, :, index].set(new_BLH)


def add_heads(x_BLH: jax.Array, heads: Heads, new_BLH: jax.Array) -> jax.Array:
  """x, with the results of heads added to it, in an order that is fixed."""
  index = index_of(heads, x_BLH.shape[2])
  if isinstance(index, slice):
    return x_BLH + new_BLH

  # A head that occurs several times: a sum has an order, a scatter may not.
  distinct = np.unique(index)
  if len(distinct) < len(index):
    sums = []
    for head in distinct:
      own_BLH = new_BLH[:, :, index == head]
      sums.append(own_BLH.sum(2))
    new_BLH = jnp.stack(sums, axis=2)
  return x_BLH.at[:, :, distinct].add(new_BLH)
