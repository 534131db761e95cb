"""Patterns that a function of positions, or a matrix, defines."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from concurrent import futures

import numpy as np

from sparse_transformer.patterns import intervals
from sparse_transformer.patterns.base import Booleans, Integers, Pattern
from sparse_transformer.patterns.checks import shorten
from sparse_transformer.patterns.content import Lazy, jax, jnp

checkify = Lazy("jax.experimental.checkify")

Function = Callable[[Integers, Integers], Booleans]


@dataclasses.dataclass(frozen=True)
class _Where(Pattern):
  """The pairs for which a function holds.

  Equal patterns have the same function, name and n.
  """

  function: Function
  name: str
  n: int = 0  # the only number of positions; 0 for any

  @functools.cached_property
  def is_plain(self) -> bool:
    """Whether the function uses only what any mask may.

    Then bounds decide whole tiles, as for a class of patterns.
    """
    zero = intervals.Int32(0, 0)
    try:
      intervals.as_truth(self.function(zero, zero))
    except Exception:
      return False
    return True

  @functools.cached_property
  def vectorized(self) -> Function:
    """The function of arrays, in JAX on the host too: they round alike."""
    return jax.jit(jnp.vectorize(self.function))

  def mask(self, q: Integers, k: Integers) -> Booleans:
    if self.is_plain:
      return self.function(q, k)

    # Bounds cannot decide any pair: all tiles are evaluated pair by pair.
    if isinstance(q, intervals.Integer):
      if isinstance(q, intervals.Int32):  # called by `check`
        self._check_lookups(q.high + 1)
      return intervals.Truth(may=np.True_, must=np.False_)

    # Within a program, the function becomes part of it.
    if isinstance(q, jax.Array) or isinstance(k, jax.Array):
      with jax.numpy_rank_promotion("allow"):
        return self.vectorized(q, k)
    mask = _on_host(self.vectorized, np.int32(q), np.int32(k))
    return np.asarray(mask)

  def _check_lookups(self, n):
    """Checks that a sequence of n positions stays within the tables."""
    if self.n not in (0, n):
      raise ValueError(f"{self} has {self.n} positions, but {n} are needed")

    # JAX would take the last entry of a table that is too short. The first and
    # the last position show whether one is.
    checked = checkify.checkify(self.vectorized, errors=checkify.index_checks)
    ends = [0, n - 1]
    q, k = np.ix_(ends, ends)
    error, _ = _on_host(jax.jit(checked), q, k)
    if message := error.get():
      raise ValueError(f"{self} with {n} positions: {message}")

  def beginning(self, n: int) -> Pattern:
    return dataclasses.replace(self, n=n) if self.n else self

  def __str__(self) -> str:
    return self.name


@dataclasses.dataclass(frozen=True)
class _Lookup:
  """The function of a matrix, equal to that of an equal matrix.

  The digest stands for the bits, which have no hash.
  """

  digest: str
  bits: np.ndarray = dataclasses.field(compare=False)

  def __call__(self, q: Integers, k: Integers) -> Booleans:
    # Eight keys to a byte, the lowest bit first.
    byte = jnp.asarray(self.bits)[q, k // 8]
    return byte >> k % 8 & 1 == 1


def _on_host(function, q, k):
  """Runs a function of JAX outside of the program that is being traced.

  A new thread traces no program, and has no mesh: results are concrete.
  """
  # The setting may be of this thread alone.
  has_64_bits = jax.config.jax_enable_x64

  def run():
    with jax.enable_x64(has_64_bits), jax.numpy_rank_promotion("allow"):
      return function(q, k)

  with futures.ThreadPoolExecutor(1) as threads:
    return threads.submit(run).result()


def where(function: Function) -> Pattern:
  """Makes a pattern of the pairs for which a function of positions holds.

  It is for `attend`; a config's pattern needs a class, see `register`.

  Args:
    function: (q, k) -> bool, like a `mask_mod` of FlexAttention without batch
      and head. It is called with positions, int32, and may look up in JAX
      arrays that are known before tracing. Patterns are equal if their
      functions are the same object, so a function that is defined again, also
      by `lambda`, is compiled again. What it returns must never change.

  Returns:
    The pattern. If the function uses + - * // % abs & | ~ and comparisons only,
    whole tiles are decided at once; otherwise all pairs are evaluated, tile by
    tile, which is n x n work.

  Raises:
    ValueError: the function does not return a boolean, or fails.

  >>> import jax.numpy as jnp
  >>> document = jnp.array([0, 0, 0, 1, 1, 1])
  >>> print(where(lambda q, k: document[q] == document[k]).pairs(6))
  18
  """
  name = shorten(getattr(function, "__name__", function))
  pattern = _Where(function, f"where({name})")

  # One pair shows whether the function can be used at all, before any work.
  zero = np.zeros(1, int)
  try:
    mask = pattern.mask(zero, zero)
    is_boolean = pattern.is_plain or (
      mask.shape == zero.shape and mask.dtype == bool
    )
    if not is_boolean:
      raise TypeError(f"it returns {mask.dtype} {[*mask.shape[1:]]}")
  except Exception as error:
    # Errors of JAX have pages of advice after their first line.
    line = f"{error}\n".splitlines()[0]
    raise ValueError(
      f"{pattern} must return a boolean for positions q and k, which are"
      " integers of JAX: use & | ~ for and, or, not; look up in"
      f" jnp.asarray(table), which is known before tracing: {shorten(line)}"
    ) from error
  return pattern


def explicit(matrix: np.ndarray) -> Pattern:
  """Makes a pattern of the pairs that a matrix lists.

  It is for `attend`, with n positions; a config's pattern needs a class, see
  `register`.

  Args:
    matrix: bool [n, n], one row per query, known before tracing. Patterns are
      equal if their matrices are. Compiled programs hold n x n bits.

  Returns:
    The pattern, for n positions only.

  Raises:
    ValueError: the matrix is not one of booleans.

  >>> print(explicit(np.tri(4, dtype=bool)).pairs(4))
  10
  """
  # A traced matrix has no values: None fails the check.
  is_known = not isinstance(matrix, jax.core.Tracer)
  pairs = np.asarray(matrix if is_known else None)
  n = math.isqrt(pairs.size)
  if pairs.dtype != bool or pairs.shape != (n, n):
    raise ValueError(
      "explicit needs booleans [n, n] that are known before tracing, got"
      f" {type(matrix).__name__} of {pairs.dtype} {[*np.shape(matrix)]}"
    )

  bits = np.packbits(pairs, axis=1, bitorder="little")
  digest = hashlib.sha256(bits).hexdigest()
  return _Where(_Lookup(digest, bits), f"explicit({digest[:8]!r})", n)
