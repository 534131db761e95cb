"""The arguments of `attend`: what is invalid is a ValueError of one line."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.contract import Case, Keys, Queries, Scores
from sparse_transformer.patterns import Pattern, parse, shorten

DTYPES = "bfloat16", "float16", "float32", "float64"


def check_arrays(
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  v_BMGE: jax.Array,
  segments_BL: jax.Array | None,
  first: jax.Array | int | None,
) -> tuple[Queries, Keys, jax.Array | None]:
  """Checks the arrays of `attend`, and returns them and `first`.

  Raises:
    ValueError: they are not arrays, or their shapes or dtypes are invalid.
  """
  given = {"q": q_BLHK, "k": k_BMGK, "v": v_BMGE}
  for name, x in given.items():
    if not isinstance(x, jax.Array | np.ndarray):
      raise ValueError(f"{name} must be an array, got {type(x).__name__}")
  dtypes = ", ".join(f"{name} {x.dtype}" for name, x in given.items())
  known = {str(x.dtype) for x in given.values()} <= {*DTYPES}
  if not known or q_BLHK.dtype != k_BMGK.dtype:
    raise ValueError(
      f"q, k, v must be among {', '.join(DTYPES)}, and q and k of the same"
      f" dtype, got {dtypes}"
    )
  q, k, v = (jnp.asarray(x) for x in given.values())
  shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
  if not q.ndim == k.ndim == v.ndim == 4:
    raise ValueError(
      "q, k, v must be [batch, n, heads, width], or all without batch, got"
      f" {shapes}"
    )
  if not all((*q.shape, *v.shape, k.shape[2])):
    raise ValueError(f"q, k, v must not be empty, got {shapes}")
  (*lengths, num_heads, width), num_key_heads = q.shape, k.shape[2]
  if k.shape[:3] != v.shape[:3] or k.shape[::3] != (lengths[0], width):
    raise ValueError(
      "q and k must have the same shape but for heads, and v may differ from k"
      f" in width only, got {shapes}"
    )
  n, longest = lengths[1], k.shape[1]
  if first is None and n != longest:
    raise ValueError(
      f"q has {n} positions and k {longest}; if they are some of them, pass"
      " first=, the position of the first query"
    )
  if first is not None:
    first = check_first(first, n, longest)
  if num_heads % num_key_heads:
    raise ValueError(
      f"the {num_key_heads} heads of k and v must divide the {num_heads} heads"
      f" of q, got {shapes}"
    )
  if segments_BL is None:
    return Queries(q), Keys(k, v), first
  segments = jnp.asarray(segments_BL)
  if segments.shape != k.shape[:2] or segments.dtype.kind not in "iu":
    raise ValueError(
      f"segments must be integers {list(k.shape[:2])}, one for each position,"
      f" got {segments.dtype} {list(segments.shape)}"
    )
  of_keys = of_queries = segments.astype(jnp.int32)[..., None]
  if first is not None:
    of_queries = lax.dynamic_slice_in_dim(of_keys, first, n, 1)
  return Queries(q, of_queries), Keys(k, v, of_keys), first


def check_first(first: Any, num_queries: int, n: int) -> jax.Array:
  """The position of the first query; a ValueError if it is invalid."""
  is_integer = isinstance(first, int | np.integer)
  is_scalar = is_integer or getattr(first, "shape", None) == ()
  if not is_scalar or jnp.result_type(first).kind not in "iu":
    raise ValueError(f"first={first} must be an integer, which may be traced")
  if is_integer and not 0 <= first <= n - num_queries:
    raise ValueError(
      f"first={first} must lie between 0 and {n - num_queries}, since q has"
      f" {num_queries} of the {n} positions of k"
    )
  return jnp.asarray(first, jnp.int32)


def add_batch(*arrays: Any) -> list[Any]:
  """The same arrays with an axis of one sequence; others as they are."""
  is_array = (isinstance(x, jax.Array | np.ndarray) for x in arrays)
  return [x[None] if y else x for x, y in zip(arrays, is_array, strict=True)]


def check_scores(scale: float | None, softcap: float) -> Scores:
  """The scores of `attend`.

  Raises:
    ValueError: an argument is no number, or out of range.
  """
  numbers = int | float | np.number
  if scale is not None and not isinstance(scale, numbers):
    raise ValueError(
      f"{scale=} must be a number known before tracing; multiply q by another"
    )
  if not isinstance(softcap, numbers) or not 0 <= softcap < math.inf:
    raise ValueError(
      f"{softcap=} must be a number above 0 known before tracing, or 0 for none"
    )
  return Scores(None if scale is None else float(scale), float(softcap))


def check_sinks(sinks_H: jax.Array, case: Case) -> jax.Array:
  """The sinks of `attend`; a ValueError if they are invalid."""
  sinks = jnp.asarray(sinks_H)
  if sinks.shape != (case.num_heads,) or sinks.dtype.kind != "f":
    raise ValueError(
      f"sinks must be [{case.num_heads}] numbers in floating point, one for"
      f" each query head, got {sinks.dtype} {list(sinks.shape)}"
    )
  return sinks


def patterns_of_heads(
  patterns: Pattern | str | Sequence[Pattern | str], num_heads: int, length: int
) -> tuple[Pattern, ...]:
  """The patterns of `attend`, one per head; a ValueError if any is invalid."""
  is_several = isinstance(patterns, tuple | list)
  given: Any = patterns if is_several else (patterns,) * num_heads
  if len(given) != num_heads:
    raise ValueError(
      f"{len(given)} patterns for {num_heads} heads; pass one per head, or"
      " a single pattern for all"
    )
  heads = tuple(map(_pattern_of, given))
  for pattern in heads:
    pattern.check(length)
  return heads


def _pattern_of(given):
  pattern = given
  if isinstance(given, str):
    factors = parse(given)
    if len(factors) == len(factors[0]) == 1:
      ((pattern,),) = factors
  if not isinstance(pattern, Pattern):
    raise ValueError(
      f"{shorten(repr(given))} is not a pattern: pass one, as a Pattern or as"
      " text, or a tuple with one per head"
    )
  return pattern


def check_tile(tile: int, length: int) -> int:
  """The tile, no larger than the smallest one that holds all positions."""
  is_integer = isinstance(tile, int | np.integer)
  if not is_integer or isinstance(tile, bool) or tile < 0:
    raise ValueError(f"{tile=} must be a positive integer, or 0 to choose one")
  return min(int(tile), max(32, 1 << (length - 1).bit_length()))
