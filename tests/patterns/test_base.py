"""The algebra of patterns, and what their constructors reject."""

import operator

import numpy as np
import pytest

from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Global,
  Local,
  Strided,
  Summary,
)


def test_union_of_patterns_in_natural_order_is_one_part():
  assert len((Local(4) | Block(3) | Global(2)).parts()) == 1
  assert len((Local(4) | Strided(3)).parts()) == 2
  assert len(BigBird(4).parts()) == 1


def test_patterns_are_values():
  made = [Local(4) | Strided(4), Local(4) | Strided(4), Local(4) | Strided(5)]
  assert made[0] == made[1] != made[2]
  assert len(set(made)) == 2
  assert Local(4) | Strided(4) != Local(4) & Strided(4)
  assert Strided(4, 0) == Strided(4) != Strided(4, 1)
  assert str(Strided(4, 0)) == "Strided(4)"
  assert repr(Strided(np.int64(4))) == repr(Strided(4))


@pytest.mark.parametrize(
  "combine",
  [lambda a, b: a and b, lambda a, b: a or b, lambda a, b: operator.not_(a)],
)
def test_logical_operators_are_rejected(combine):
  with pytest.raises(TypeError, match="& -"):
    combine(Causal(), Local(1))


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: Local("3" * 5000), ["'333", "...", "integer"]),
    (lambda: Summary(8, 3, 2), ["shift=2", "(shift + 1) * width"]),
    (lambda: Strided(8, -1), ["offset=-1", "at least 0"]),
    (lambda: Strided(8, False), ["offset", "integer, not False"]),
    (lambda: BigBird(num_random=33), ["num", "at most 32"]),
    (lambda: BigBird(2**30, num_global=9), ["size", "32 bits"]),
    (lambda: Causal().layout(0, 4), ["n=0", "at least 1"]),
  ],
)
def test_error_about_a_wrong_field_states_its_value_and_the_rule(make, words):
  with pytest.raises(ValueError) as error:
    make()
  assert len(str(error.value)) < 400
  for word in words:
    assert word in str(error.value)
