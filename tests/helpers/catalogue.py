"""Small patterns that tests run over: all registered ones, and more.

CAUSAL, BIDIRECTIONAL, ALL: the examples of every registered class, combinations
of them, and user-defined patterns that are not in the catalogue.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from helpers.examples import STATIC

from sparse_transformer import patterns
from sparse_transformer.patterns import Block, Local, Pattern, Strided, Summary


@dataclasses.dataclass(frozen=True)
class Masked(Pattern):
  """A pattern with a given mask."""

  function: Callable

  def mask(self, q, k):
    return self.function(q, k)


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs(Pattern):
  """The pairs of a matrix, for masks of NumPy alone."""

  matrix_LM: np.ndarray

  def mask(self, q, k):
    return self.matrix_LM[q, k]


class Fifths(Pattern):
  """A causal pattern in which many queries have no key."""

  def mask(self, q, k):
    return (k < q - 7) & (k % 5 == 3) & (q % 3 != 1)


class Thirds(Pattern):
  """A causal pattern with holes, which depend on residues of both sides."""

  def mask(self, q, k):
    return (k <= q) & (k * 2 % 3 == q % 3) & ((q - k) // 4 != 1)


class Around(Pattern):
  """A bidirectional pattern: three keys on each side of the query."""

  def mask(self, q, k):
    return abs(q - k) <= 3


@dataclasses.dataclass(frozen=True)
class Comb(Pattern):
  """The multiples of `step` among the last `window` keys.

  This is all that a new class of patterns needs; see `registered`.
  """

  window: int
  step: int

  def mask(self, q, k):
    return (k <= q) & (q - k < self.window) & (k % self.step == 0)

  def orders(self, n):
    i = np.arange(n)
    return i, np.argsort(i % self.step != 0, kind="stable")


TABLE = jnp.array([5, 5, 2, 5, 2, 2, 7, 5, 2])


def similar(q, k):
  """A function that bounds cannot evaluate, for `where`."""
  return (TABLE[q % 9] == TABLE[k % 9]) & jnp.where(q < 40, k <= q, k == q)


def given(n):
  """Heads of patterns that functions and a matrix give, for n positions."""
  matrix = np.random.default_rng(0).random((n, n)) < 0.2
  sparse = patterns.explicit(matrix)
  past = patterns.explicit(np.tril(matrix))
  distance = patterns.where(lambda q, k: abs(q - k) % 7 < 3)
  return (
    sparse,
    patterns.where(similar),
    distance,
    past | Strided(5),
    Local(9) - sparse,
    distance & past,
  )


@contextlib.contextmanager
def registered(cls):
  """Registers a class of patterns temporarily."""
  patterns.register(cls)
  try:
    yield cls
  finally:
    del patterns.CATALOGUE[cls.__name__]


CAUSAL = (
  *(pattern for e in STATIC.values() for pattern in e.causal),
  Local(12) | Strided(12),
  Block(20) | Summary(20, 4),
  (Local(9) - Local(2)) & Strided(3),
  Fifths(),
  Thirds(),
  patterns.where(similar),
)

BIDIRECTIONAL = (
  *(pattern for e in STATIC.values() for pattern in e.bidirectional),
  Block(20, causal=False) | Summary(20, 4, causal=False),
  Around(),
)

ALL = CAUSAL + BIDIRECTIONAL


def numbers(largest):
  """Functions (q, k) -> integers, of the operators that a mask may use.

  Args:
    largest: the largest constant that a number is multiplied or divided by.
  """
  # Machines with accelerators, which run over these patterns, may lack it.
  from hypothesis import strategies as st

  symmetric = st.sampled_from([operator.add, operator.sub, operator.mul])
  by_constant = st.sampled_from([operator.mul, operator.mod, operator.floordiv])
  small = st.integers(-5, 5)

  def grow(inner):
    return st.one_of(
      st.builds(
        lambda f, a, b: lambda q, k: f(a(q, k), b(q, k)),
        symmetric,
        inner,
        inner,
      ),
      st.builds(
        lambda f, a, c: lambda q, k: f(a(q, k), c),
        by_constant,
        inner,
        st.integers(1, largest),
      ),
      st.builds(
        lambda f, a, c: lambda q, k: f(c, a(q, k)), symmetric, inner, small
      ),
      inner.map(lambda a: lambda q, k: abs(a(q, k))),
    )

  leaves = st.sampled_from([lambda q, k: q, lambda q, k: k])
  constants = small.map(lambda c: lambda q, k: c + 0 * q)
  return st.recursive(st.one_of(leaves, constants), grow, max_leaves=5)
