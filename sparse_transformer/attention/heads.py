"""Groups of heads: those with the same pattern, and those with one KV head.

Heads with the same pattern run together. Query head h uses KV head h // group,
as in grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245).
Multi-head attention (group = 1) and multi-query attention (a single KV head)
are special cases.
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
  """Returns an index of heads, or a slice for all heads, to avoid a copy."""
  if heads == tuple(range(num_heads)):
    return slice(None)
  return np.array(heads)


def key_heads(heads: Heads, group: int) -> Heads:
  """Returns the KV heads that query heads use.

  Each KV head in the result serves the same number of consecutive query heads.
  KV heads are repeated if necessary, as KV head 0 is for query heads 0 to 2 in
  the example.

  >>> key_heads((0, 1, 2, 3), 2), key_heads((0, 1, 2), 2)
  ((0, 1), (0, 0, 1))
  """
  shared = np.array(heads) // group

  # Find the largest number of query heads in a row that share a KV head. One
  # query head per KV head is always possible.
  for size in range(group, 0, -1):
    if len(heads) % size == 0:
      rows = shared.reshape(-1, size)
      firsts = rows[:, 0]
      if (rows == firsts[:, None]).all():
        break
  return tuple(firsts.tolist())


def request_of(request: Request, pattern: Pattern, heads: Heads) -> Request:
  """Returns the request for some heads only, all with the same pattern."""
  return dataclasses.replace(
    request,
    patterns=(pattern,) * len(heads),
    num_key_heads=len(key_heads(heads, request.group)),
  )


@functools.lru_cache(maxsize=256)
def heads_of_parts(
  patterns: tuple[Pattern, ...], n: int
) -> tuple[tuple[Pattern, Heads], ...]:
  """Returns each distinct part that has pairs, with the heads that use it."""
  by_part = group_heads([pattern.parts() for pattern in patterns])
  return tuple(item for item in by_part.items() if item[0].pairs(n))


def group_heads(
  patterns_H: Sequence[Sequence[Pattern]],
) -> dict[Pattern, Heads]:
  """Maps each distinct pattern to the heads whose patterns include it."""
  heads: dict[Pattern, Heads] = {}
  for head, patterns in enumerate(patterns_H):
    for pattern in patterns:
      heads[pattern] = (*heads.get(pattern, ()), head)
  return heads


def put_heads(x_BLH: jax.Array, heads: Heads, new_BLH: jax.Array) -> jax.Array:
  """Returns x with the results of some heads replaced, in the dtype of x."""
  index = index_of(heads, x_BLH.shape[2])
  if isinstance(index, slice):  # avoids a scatter with empty indices
    return new_BLH.astype(x_BLH.dtype)
  return x_BLH.at[:, :, index].set(new_BLH)


def add_heads(x_BLH: jax.Array, heads: Heads, new_BLH: jax.Array) -> jax.Array:
  """Returns x with the results of heads added to it, in a fixed order."""
  index = index_of(heads, x_BLH.shape[2])
  if isinstance(index, slice):
    return x_BLH + new_BLH

  # If a head occurs several times, its results are summed first, because a
  # scatter may add them in any order.
  distinct = np.unique(index)
  if len(distinct) < len(index):
    sums = []
    for head in distinct:
      own_BLH = new_BLH[:, :, index == head]
      sums.append(own_BLH.sum(2))
    new_BLH = jnp.stack(sums, axis=2)
  return x_BLH.at[:, :, distinct].add(new_BLH)
