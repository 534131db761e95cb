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


def test_combinations_of_others_are_not_restricted():
  (Local(2) | LSH(4, 6) | TopBlocks(8, 2)).check(1000)
