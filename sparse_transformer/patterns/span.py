"""A pattern that reaches back as far as a learned span says."""

import dataclasses
from typing import Any

import numpy as np

from sparse_transformer.patterns.base import (
  Difference,
  Pattern,
  Union,
  check_fields,
)
from sparse_transformer.patterns.catalogue import Local
from sparse_transformer.patterns.checks import shorten
from sparse_transformer.patterns.content import Content
from sparse_transformer.patterns.registry import register


@register
@dataclasses.dataclass(frozen=True)
class AdaptiveSpan(Content):
  """The last keys, as far back as the learned span of the head.

  With a span of z positions, the key d positions before its query has a weight
  m = clip((ramp + z - d) / ramp, 0, 1), by which exp(score) is multiplied in
  the softmax: 1 up to d = z, 0 from d = z + ramp on, and between these a ramp,
  which gives the span its gradient.

  It can be combined with static patterns, whose pairs all have weight 1: a
  union takes the larger weight, an intersection the smaller.

  Source: Sukhbaatar et al. 2019, arXiv 1905.07799. Their released code attends
  to `max` keys at most, so that the ramp of a longest span is cut off. Here a
  query attends to up to `max + ramp` keys.

  Attributes:
    max: the longest span, in positions.
    ramp: positions over which the weight falls from 1 to 0.
  """

  max: int
  ramp: int = 32

  def __post_init__(self) -> None:
    check_fields(self, "max", "ramp")
    check_fields(self.support(), "window")  # their sum

  def support(self) -> Pattern:
    return Local(self.max + self.ramp)

  def most_keys(self, n: int) -> int:
    return min(n, self.max + self.ramp)

  def chances(self, q: np.ndarray, k: np.ndarray, n: int) -> np.ndarray:
    del n  # 1 for all pairs of the longest span
    return self.support().mask(q, k) * 1.0

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
