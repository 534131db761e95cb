"""Finds where a network for text needs keys that depend on the content.

For each byte of a sequence, `last_match` finds the byte that followed the last
occurrence of the bytes before it. `describe` counts how often this byte is far
away. `LastMatch` is a pattern that shows this byte to a network, so its gain is
what a learned choice of one key could gain from copying the last match.

Axes: B sequences, L bytes in each.
"""

import dataclasses
import lzma
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import ngrams
from sparse_transformer import patterns
from sparse_transformer.patterns import shorten

ORDER = 6  # number of bytes that must match
FAR = 129, 16_384  # distances that count as far: beyond a window of 128
PACKED = 3  # bytes packed into a 32-bit integer, without its sign


def last_match(symbols_BL: jax.Array, order: int = ORDER) -> jax.Array:
  """Returns the index of the byte that followed the last equal context.

  The context of position t is the `order` bytes before t, which are known when
  byte t is predicted. The result, int32 [B, L], is -1 if there is no equal
  context, as for the first `order` positions.

  >>> last_match(jnp.array([list(b"abcabcab")]), order=2).tolist()
  [[-1, -1, -1, -1, -1, 2, 3, 4]]
  """
  return jax.vmap(lambda x: _last_match(x, order))(symbols_BL)


def _last_match(symbols_L, order):
  n = len(symbols_L)
  at_L = jnp.arange(n, dtype=jnp.int32)
  padded = jnp.pad(symbols_L.astype(jnp.int32), (order, 0))

  # Pack contexts into integers instead of hashing them, to avoid collisions.
  contexts = []
  for first in range(0, order, PACKED):
    packed_L = jnp.zeros_like(at_L)
    for i in range(first, min(first + PACKED, order)):
      packed_L = packed_L * 256 + padded[i : i + n]
    contexts.append(packed_L)

  # Sort, so that equal contexts become neighbors, in the order of positions.
  *sorted_L, order_L = jax.lax.sort((*contexts, at_L), num_keys=len(contexts))
  is_same = jnp.ones(n - 1, bool)
  for x in sorted_L:
    is_same &= x[1:] == x[:-1]
  # Exclude contexts that would begin before the sequence.
  is_same &= order_L[:-1] >= order
  before = jnp.where(is_same, order_L[:-1], -1)
  before = jnp.pad(before, (1, 0), constant_values=-1)
  return jnp.zeros_like(at_L).at[order_L].set(before)


def describe(content: bytes) -> dict[str, Any]:
  """Counts the matches in a text, which is treated as one sequence.

  Returns:
    A dict of `bytes`, the size; `lzma`, bits/byte by kibibytes of the
    dictionary; `far`, the fraction of positions whose last match is at a
    distance in `FAR`; and `right`, the fraction of these positions whose byte
    equals the byte that followed the match.
  """
  symbols_L = np.frombuffer(content, np.uint8)
  match_L = np.asarray(jax.jit(last_match)(symbols_L[None])[0])
  distance_L = np.arange(len(symbols_L)) - match_L
  is_far_L = (match_L >= 0) & (FAR[0] <= distance_L) & (distance_L <= FAR[1])
  is_right_L = symbols_L[match_L] == symbols_L
  return dict(
    bytes=len(content),
    lzma={kib: lzma_bits(content, kib) for kib in (4, 64, 8192)},
    far=float(is_far_L.mean()),
    right=float(is_right_L[is_far_L].mean()),
  )


def copy_rule(
  train: np.ndarray, scored: np.ndarray, length: int
) -> dict[str, float]:
  """Scores the simplest model that copies the byte after the last match.

  If the window contains a match, the byte that followed it has a fixed
  probability: how often such bytes are right in the training split. Other bytes
  share the rest, in proportion to their probability by counts (see `ngrams`).

  Args:
    train, scored: the training split, and the split to score, uint8 [n].
    length: the number of bytes of a window. Windows are scored separately.

  Returns:
    A dict of `bits`, in bits/byte; `found`, the fraction of bytes with a match
    in their window; `far`, the fraction of those whose match is more than 128
    bytes back; and `right`, the fraction of matches that are followed by the
    byte to predict.
  """
  known = ngrams.windows_of(train, length)
  num_found = num_right = 0
  for symbols_BL in known:
    distance_BL, copied_BL = _copies(symbols_BL)
    num_found += np.count_nonzero(distance_BL)
    num_right += np.sum((distance_BL > 0) & (copied_BL == symbols_BL))
  p_right = (num_right + 1) / (num_found + 2)
  orders = ngrams.count(known)

  bits, distances, is_right = [], [], []
  for symbols_BL in ngrams.windows_of(scored, length):
    distance_BL, copied_BL = _copies(symbols_BL)
    is_right_BL = copied_BL == symbols_BL
    p_BL = ngrams.probability(orders, symbols_BL, symbols_BL)
    others_BL = 1 - ngrams.probability(orders, symbols_BL, copied_BL)
    others_BL = np.where(is_right_BL, 1, others_BL)  # not used there
    wrong_BL = (1 - p_right) * p_BL / others_BL
    matched_BL = np.where(is_right_BL, p_right, wrong_BL)
    p_BL = np.where(distance_BL > 0, matched_BL, p_BL)
    bits.append(-np.log2(p_BL).ravel())
    distances.append(distance_BL.ravel())
    is_right.append(is_right_BL.ravel())

  distance = np.concatenate(distances)
  is_found = distance > 0
  right = np.concatenate(is_right) & is_found
  return dict(
    bits=float(np.concatenate(bits).mean()),
    found=float(is_found.mean()),
    far=float((distance >= FAR[0]).sum() / max(1, is_found.sum())),
    right=float(right.sum() / max(1, is_found.sum())),
  )


def _copies(symbols_BL):
  """Returns the distance of the last match, 0 for none, and its next byte."""
  match_BL = np.asarray(jax.jit(last_match)(symbols_BL))
  at_L = np.arange(symbols_BL.shape[1])
  distance_BL = np.where(match_BL >= 0, at_L - match_BL, 0)
  copied_BL = np.take_along_axis(symbols_BL, at_L - distance_BL, axis=1)
  return distance_BL, copied_BL


def lzma_bits(content: bytes, kib: int) -> float:
  """Returns bits/byte of raw LZMA with a dictionary of `kib` kibibytes."""
  filters = [dict(id=lzma.FILTER_LZMA2, preset=9, dict_size=kib * 1024)]
  packed = lzma.compress(content, lzma.FORMAT_RAW, filters=filters)
  return 8 * len(packed) / len(content)


@dataclasses.dataclass(frozen=True)
class LastMatch(patterns.Selected):
  """The block that contains the byte after the last match.

  A match is an earlier occurrence of the `order` bytes before the query. It
  counts only if it is at most `most` positions back; 0 means any distance.
  """

  size: int
  num: int = 1
  order: int = ORDER
  most: int = 0

  blocks_from = "symbols"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num != 1:
      raise ValueError(
        f"{shorten(self)}: num must be 1, because there is only one last match"
      )

  def select(self, symbols_BL: jax.Array | None) -> jax.Array:
    if symbols_BL is None:
      raise ValueError(
        f"{shorten(self)} requires entire sequences, so it cannot be sampled"
      )
    match_BL = last_match(symbols_BL, self.order)
    distance_BL = jnp.arange(symbols_BL.shape[1])[None] - match_BL
    is_found_BL = match_BL >= 0
    if self.most:
      is_found_BL &= distance_BL <= self.most
    # Inputs are shifted by one, so the key after a byte holds it.
    blocks_BL = jnp.where(is_found_BL, (match_BL + 1) // self.size, -1)
    return blocks_BL[:, None, :, None]
