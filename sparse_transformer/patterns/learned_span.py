"""Attention as far back as a head has learned to look."""

import dataclasses
from typing import Any

from sparse_transformer.patterns.base import (
  Difference,
  Pattern,
  Union,
  register,
)
from sparse_transformer.patterns.catalogue import Local
from sparse_transformer.patterns.checks import shorten
from sparse_transformer.patterns.content import Array, Spanned


@register
@dataclasses.dataclass(frozen=True)
class AdaptiveSpan(Spanned):
  """The last keys, as far back as the learned span of the head.

  With a span of z positions, at most `max`, the key d positions before its
  query has a weight clip((ramp + z - d) / ramp, 0, 1), by which exp(score) is
  multiplied in the softmax. The ramp gives the span its gradient. Pairs of
  static patterns have weight 1: a union takes the larger weight, an
  intersection the smaller.

  Source: Sukhbaatar et al. 2019, arXiv 1905.07799, where the ramp of the
  longest span is cut off.
  """

  max: int
  ramp: int = 32

  def __post_init__(self) -> None:
    super().__post_init__()
    self.support()  # which checks their sum

  @property
  def longest(self) -> int:
    return self.max

  def support(self) -> Pattern:
    return Local(self.max + self.ramp)

  def most_keys(self, n: int) -> int:
    return min(n, self.max + self.ramp)

  def end(self, spans: Array) -> Array:
    return spans + self.ramp

  def weights(self, spans: Array, distance: Array) -> Array:
    import jax.numpy as jnp
    from jax import lax

    # At the ends of the ramp, the derivative with respect to the span is 0.
    room = spans + self.ramp - distance
    first, last = (jnp.asarray(end, room.dtype) for end in (0, self.ramp))
    return lax.clamp(first, room, last) / self.ramp

  def check_within(self, pattern: Any) -> None:
    if pattern.contents() != (self,):
      raise ValueError(
        f"{shorten(pattern)}: a head can combine {shorten(self)} with static"
        " patterns only"
      )
    is_twice = isinstance(pattern, Union) and pattern.left.contents()
    if is_twice and pattern.right.contents():
      raise ValueError(
        f"{shorten(pattern)} has {shorten(self)} on both sides of |; write it"
        " once, as in AdaptiveSpan(...) & (A | B)"
      )
    if isinstance(pattern, Difference) and pattern.right.contents():
      raise ValueError(
        f"{shorten(pattern)}: the pairs of {shorten(self)} have weights, and"
        " cannot be taken from another pattern"
      )
