"""Where in a text a network needs keys whose place depends on the content.

`last_match` finds, for each byte of a sequence, what followed the last time
that the bytes before it occurred. `describe` counts how often that is far away.
`LastMatch` hands it to a network: no learned choice of keys can know more of a
copy, so that its gain bounds theirs.

Axes: B sequences, L bytes of each.
"""

import dataclasses
import lzma
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer import patterns
from sparse_transformer.patterns import shorten

ORDER = 6  # bytes that have to agree
FAR = 129, 16_384  # positions back: behind a window of 128, at most this many
PACKED = 3  # bytes in an integer of 32 bits, without its sign


def last_match(symbols_BL: jax.Array, order: int = ORDER) -> jax.Array:
  """The place of the byte that followed the last same context: int32 [B, L].

  The context of position t are the `order` bytes before t, so that a network
  that predicts byte t may use it. -1 for none, as for the first `order`
  positions: each sequence starts without a past.

  >>> last_match(jnp.array([list(b"abcabcab")]), order=2).tolist()
  [[-1, -1, -1, -1, -1, 2, 3, 4]]
  """
  return jax.vmap(lambda x: _last_match(x, order))(symbols_BL)


def _last_match(symbols_L, order):
  n = len(symbols_L)
  at_L = jnp.arange(n, dtype=jnp.int32)
  padded = jnp.pad(symbols_L.astype(jnp.int32), (order, 0))

  # Context as integers of a few bytes each: no hash, so nothing collides.
  contexts = []
  for first in range(0, order, PACKED):
    packed_L = jnp.zeros_like(at_L)
    for i in range(first, min(first + PACKED, order)):
      packed_L = packed_L * 256 + padded[i : i + n]
    contexts.append(packed_L)

  # Equal contexts become neighbors, in the order of their positions.
  *sorted_L, order_L = jax.lax.sort((*contexts, at_L), num_keys=len(contexts))
  is_same = jnp.ones(n - 1, bool)
  for x in sorted_L:
    is_same &= x[1:] == x[:-1]
  # Contexts that begin before the sequence are none.
  is_same &= order_L[:-1] >= order
  before = jnp.where(is_same, order_L[:-1], -1)
  before = jnp.pad(before, (1, 0), constant_values=-1)
  return jnp.zeros_like(at_L).at[order_L].set(before)


def describe(content: bytes) -> dict[str, Any]:
  """What is where in a text, all of it one sequence.

  Returns:
    `lzma`: bits/byte by kibibytes of the dictionary; `far`: the share of the
    positions whose nearest match is as far as `FAR`; `right`: the share of
    these whose byte is the one that followed the match.
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


def lzma_bits(content: bytes, kib: int) -> float:
  """Bits/byte of raw LZMA with a dictionary of some kibibytes."""
  filters = [dict(id=lzma.FILTER_LZMA2, preset=9, dict_size=kib * 1024)]
  packed = lzma.compress(content, lzma.FORMAT_RAW, filters=filters)
  return 8 * len(packed) / len(content)


@dataclasses.dataclass(frozen=True)
class LastMatch(patterns.Selected):
  """The block with the byte that followed the last match.

  A match is an earlier place where the `order` bytes before the query occurred.
  It counts only if it is at most `most` positions back; 0 for any.
  """

  size: int
  num: int = 1
  order: int = ORDER
  most: int = 0

  blocks_from = "symbols"

  def __post_init__(self) -> None:
    super().__post_init__()
    if self.num != 1:
      raise ValueError(f"{shorten(self)}: there is one last match, not more")

  def select(self, symbols_BL: jax.Array | None) -> jax.Array:
    if symbols_BL is None:
      raise ValueError(f"{shorten(self)} needs entire sequences: do not sample")
    match_BL = last_match(symbols_BL, self.order)
    distance_BL = jnp.arange(symbols_BL.shape[1])[None] - match_BL
    is_found_BL = match_BL >= 0
    if self.most:
      is_found_BL &= distance_BL <= self.most
    # Inputs are shifted: the key after a byte holds it.
    blocks_BL = jnp.where(is_found_BL, (match_BL + 1) // self.size, -1)
    return blocks_BL[:, None, :, None]
