"""Patterns that are defined by a function of positions or by a matrix."""

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

  Patterns are equal if they have the same function, name and n.
  """

  function: Function
  name: str
  n: int = 0  # the number of positions that it is defined for; 0 for any

  @functools.cached_property
  def is_plain(self) -> bool:
    """Whether the function uses only operators that a mask may use.

    If so, interval arithmetic classifies whole tiles, as it does for other
    patterns.
    """
    zero = intervals.Int32(0, 0)
    try:
      intervals.as_truth(self.function(zero, zero))
    except Exception:
      return False
    return True

  @functools.cached_property
  def vectorized(self) -> Function:
    """The function, vectorized over arrays and compiled by JAX.

    JAX evaluates the function on the host, too, so that results on the host and
    in compiled programs are rounded alike.
    """
    return jax.jit(jnp.vectorize(self.function))

  def mask(self, q: Integers, k: Integers) -> Booleans:
    if self.is_plain:
      return self.function(q, k)

    # Interval arithmetic cannot classify any tile, so all tiles are evaluated
    # pair by pair.
    if isinstance(q, intervals.Integer):
      if isinstance(q, intervals.Int32):  # `check` calls it
        self._check_lookups(q.high + 1)
      return intervals.Truth(may=np.True_, must=np.False_)

    # While a program is traced, the function becomes part of the program.
    if isinstance(q, jax.Array) or isinstance(k, jax.Array):
      with jax.numpy_rank_promotion("allow"):
        return self.vectorized(q, k)
    mask = _on_host(self.vectorized, np.int32(q), np.int32(k))
    return np.asarray(mask)

  def _check_lookups(self, n):
    """Checks that the function's tables have entries for n positions."""
    if self.n not in (0, n):
      raise ValueError(f"{self} has {self.n} positions, but {n} are needed")

    # If a table is too short, JAX silently returns its last entry. Lookups at
    # the first and the last position detect this.
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
  """A function that looks up a matrix; equal matrices give equal functions.

  Functions are compared by the digest of the bits, because arrays have no hash.
  """

  digest: str
  bits: np.ndarray = dataclasses.field(compare=False)

  def __call__(self, q: Integers, k: Integers) -> Booleans:
    # Each byte contains eight keys, beginning with the lowest bit.
    byte = jnp.asarray(self.bits)[q, k // 8]
    return byte >> k % 8 & 1 == 1


def _on_host(function, q, k):
  """Runs a JAX function outside of the program that is being traced.

  The function runs in a new thread. This thread is not tracing a program and
  has no mesh, so the results are concrete.
  """
  # The caller may have set this for its own thread only.
  has_64_bits = jax.config.jax_enable_x64

  def run():
    with jax.enable_x64(has_64_bits), jax.numpy_rank_promotion("allow"):
      return function(q, k)

  with futures.ThreadPoolExecutor(1) as threads:
    return threads.submit(run).result()


def where(function: Function) -> Pattern:
  """Makes a pattern of the pairs for which a function returns True.

  Use it with `attend`. A pattern that a config names must be a class, see
  `register`.

  Args:
    function: (q, k) -> bool, like a `mask_mod` of FlexAttention without batch
      and head. It is called with int32 positions, and may index JAX arrays that
      are known before tracing. Its results must never change. Patterns are
      equal if their functions are the same object, so a function that is
      defined again, for example by the same `lambda`, is compiled again.

  Returns:
    The pattern. If the function uses only + - * // % abs & | ~ and comparisons,
    whole tiles are classified at once. Otherwise, all pairs are evaluated, tile
    by tile, which is n x n work.

  Raises:
    ValueError: the function does not return a boolean, or fails.

  >>> import jax.numpy as jnp
  >>> document = jnp.array([0, 0, 0, 1, 1, 1])
  >>> print(where(lambda q, k: document[q] == document[k]).pairs(6))
  18
  """
  name = shorten(getattr(function, "__name__", function))
  pattern = _Where(function, f"where({name})")

  # Evaluating one pair shows early whether the function can be used at all.
  zero = np.zeros(1, int)
  try:
    mask = pattern.mask(zero, zero)
    is_boolean = pattern.is_plain or (
      mask.shape == zero.shape and mask.dtype == bool
    )
    if not is_boolean:
      raise TypeError(f"it returns {mask.dtype} {[*mask.shape[1:]]}")
  except Exception as error:
    # JAX errors continue with pages of advice after their first line.
    line = f"{error}\n".splitlines()[0]
    raise ValueError(
      f"{pattern} must return a boolean for positions q and k, which are"
      " integers of JAX: use & | ~ for and, or, not; look up in"
      f" jnp.asarray(table), which is known before tracing: {shorten(line)}"
    ) from error
  return pattern


def explicit(matrix: np.ndarray) -> Pattern:
  """Makes a pattern of the pairs that a matrix lists.

  Use it with `attend`, for n positions. A pattern that a config names must be a
  class, see `register`.

  Args:
    matrix: bool [n, n], one row per query, known before tracing. Patterns are
      equal if their matrices are equal. Compiled programs contain the matrix as
      n x n bits.

  Returns:
    The pattern, for n positions only.

  Raises:
    ValueError: the matrix is not a square matrix of booleans, or is traced.

  >>> print(explicit(np.tri(4, dtype=bool)).pairs(4))
  10
  """
  # A traced matrix has no values yet. None stands for it, and fails the check.
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
