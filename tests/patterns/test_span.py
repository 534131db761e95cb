"""Patterns with learned spans, before there are any spans."""

import pytest

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  LSH,
  AdaptiveSpan,
  Local,
  Strided,
  TopBlocks,
)

SPAN = AdaptiveSpan(96, ramp=16)


@pytest.mark.parametrize(
  "pattern",
  [SPAN, AdaptiveSpan(1), Strided(7) | SPAN, SPAN - Local(3), Local(8) & SPAN],
  ids=str,
)
def test_expressions_know_them(pattern):
  assert patterns.parse(str(pattern)) == ((pattern,),)
  pattern.check(1000)


def test_their_support_is_local():
  assert SPAN.support() == Local(112)
  assert (Strided(7) | SPAN).support() == Strided(7) | Local(112)
  assert [SPAN.most_keys(n) for n in (9, 1000)] == [9, 112]
  with pytest.raises(ValueError, match="no pairs before it is bound"):
    SPAN.matrix(9)


@pytest.mark.parametrize(
  "text, words",
  [
    ("AdaptiveSpan(0)", "max must be at least 1"),
    ("AdaptiveSpan(9, ramp=0)", "ramp must be at least 1"),
    ("AdaptiveSpan(9, 2.5)", "ramp must be an integer"),
    ("AdaptiveSpan(2000000000, 2000000000)", "fits in 32 bits"),
    ("Local(9) - AdaptiveSpan(9)", "Local"),
    ("AdaptiveSpan(9) - AdaptiveSpan(9)", "cannot be taken from"),
    ("AdaptiveSpan(9) | AdaptiveSpan(8)", "with static patterns only"),
    ("Local(2) | LSH(4, 6) | AdaptiveSpan(8)", "with static patterns only"),
    ("AdaptiveSpan(8) | TopBlocks(8, 2)", "with static patterns only"),
    ("AdaptiveSpan(8) | AdaptiveSpan(8)", "on both sides"),
    ("Local(2) | AdaptiveSpan(8) | AdaptiveSpan(8)", "on both sides"),
  ],
)
def test_what_cannot_be_is_rejected(text, words):
  with pytest.raises(ValueError, match=words):
    patterns.parse(text)[0][0].check(1000)


def test_combinations_of_others_are_not_restricted():
  (Local(2) | LSH(4, 6) | TopBlocks(8, 2)).check(1000)
