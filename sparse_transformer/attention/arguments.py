"""The arguments of `attend`: what is invalid is a ValueError of one line."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention.contract import Case, Keys, Queries, Scores
from sparse_transformer.patterns import (
  FACTORIZATIONS,
  LAYOUTS,
  Pattern,
  parse,
  shorten,
)

DTYPES = "bfloat16", "float16", "float32", "float64"


class Segments(NamedTuple):
  """`segments_BL` of queries whose segments are not those of their keys."""

  of_queries: jax.Array  # [B, L]
  of_keys: jax.Array  # [B, M]


def check_arrays(
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  v_BMGE: jax.Array,
  segments_BL: jax.Array | Segments | None,
  first: jax.Array | int | None,
) -> tuple[Queries, Keys, jax.Array | None]:
  """Checks the arrays of `attend`, and returns them, batched, and `first`.

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
  shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
  is_unbatched = q_BLHK.ndim == 3
  if {x.ndim for x in given.values()} != {3 if is_unbatched else 4}:
    raise ValueError(
      "q, k, v must be [batch, n, heads, width], or all without batch, got"
      f" {shapes}"
    )
  q, k, v = (jnp.asarray(x) for x in given.values())
  if is_unbatched:
    q, k, v = q[None], k[None], v[None]
  if not all(isinstance(i, int) for x in (q, k, v) for i in x.shape[1:]):
    raise ValueError(f"only the batch may be symbolic, got {shapes}")
  if not all((*q.shape, *v.shape, k.shape[2])):
    raise ValueError(f"q, k, v must not be empty, got {shapes}")
  (*lengths, num_heads, width), num_key_heads = q.shape, k.shape[2]
  if k.shape[:3] != v.shape[:3] or k.shape[::3] != (lengths[0], width):
    raise ValueError(
      "q and k must have the same shape but for heads, and v may differ from k"
      f" in width only, got {shapes}"
    )
  n, longest = lengths[1], k.shape[1]
  if n > longest or (first is None and n != longest):
    raise ValueError(
      f"q has {n} positions and k {longest}; cross-attention between sequences"
      " of different lengths is not supported; for queries at some positions of"
      " the keys, pass attend(..., first=), the position of the first query"
    )
  if first is not None:
    why = f", since q has {n} of the {longest} positions of k"
    first = check_index("first", first, longest - n + 1, why)
    first = jnp.asarray(first, jnp.int32)
  if num_heads % num_key_heads:
    raise ValueError(
      f"the {num_key_heads} heads of k and v must divide the {num_heads} heads"
      f" of q, got {shapes}"
    )
  if segments_BL is None:
    return Queries(q), Keys(k, v), first
  if isinstance(segments_BL, Segments):
    of_queries, of_keys = (x[..., None] for x in segments_BL)
    return Queries(q, of_queries), Keys(k, v, of_keys), first
  segments, shape = _as_array(segments_BL), k.shape[is_unbatched:2]
  is_valid = getattr(segments, "shape", None) == shape
  is_valid = is_valid and segments.dtype.kind in "iu"
  if is_valid and isinstance(segments, np.ndarray):
    is_valid = np.array_equal(segments, segments.astype(np.int32))
  if not is_valid:
    raise ValueError(
      f"segments must be integers {list(shape)}, one for each position, got"
      f" {describe(segments)}; they must fit in 32 bits: number the documents"
    )
  segments = jnp.asarray(segments, jnp.int32)
  if is_unbatched:
    segments = segments[None]
  of_keys = of_queries = segments[..., None]
  if first is not None:
    of_queries = lax.dynamic_slice_in_dim(of_keys, first, n, 1)
  return Queries(q, of_queries), Keys(k, v, of_keys), first


def _as_array(x):
  """An array of what is none yet; the same object if that cannot be."""
  try:
    return x if isinstance(x, np.ndarray) else jnp.asarray(x)
  except (TypeError, ValueError, OverflowError):
    return x


def is_floating(x: Any, shape: tuple[Any, ...]) -> bool:
  """True for an array of a shape, in floating point."""
  is_array = isinstance(x, jax.Array | np.ndarray) and x.shape == shape
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)


def describe(x: Any) -> str:
  """The dtype and shape of an array, or the type of another object."""
  return f"{x.dtype} {[*x.shape]}" if hasattr(x, "dtype") else type(x).__name__


def check_index(name: str, index: Any, stop: int, why: str = "") -> Any:
  """The index, an int if it is not traced; a ValueError if it is invalid."""
  shape = getattr(index, "shape", ())
  known = isinstance(index, int | np.integer | np.ndarray | jax.Array)
  if not known or shape or jnp.result_type(index).kind not in "iu":
    hint = "; for sequences at different positions, use jax.vmap"
    raise ValueError(
      f"{name}={shorten(' '.join(str(index).split()))} must be an integer,"
      f" which may be traced{hint if shape else ''}"
    )
  if isinstance(index, jax.core.Tracer):
    return index
  index = int(index)
  if not 0 <= index < stop:
    raise ValueError(f"{name}={index} must lie between 0 and {stop - 1}{why}")
  return index


def check_sizes(**sizes: Any) -> None:
  """Raises a ValueError if a size is not a positive integer."""
  for name, x in sizes.items():
    is_integer = isinstance(x, int | np.integer) and not isinstance(x, bool)
    if not is_integer or x < 1:
      raise ValueError(f"{name}={x!r} must be a positive integer")


def check_scores(scale: float | None, softcap: float) -> Scores:
  """The scores of `attend`.

  Raises:
    ValueError: an argument is not a number, or is out of range.
  """
  if scale is not None and not _is_finite(scale):
    raise ValueError(
      f"{scale=} must be a finite number known before tracing; multiply q by"
      " another"
    )
  if not _is_finite(softcap) or softcap < 0:
    raise ValueError(
      f"{softcap=} must be a number above 0 known before tracing, or 0 for none"
    )
  return Scores(None if scale is None else float(scale), float(softcap))


def _is_finite(x):
  """True for a finite real number that is known."""
  is_number = isinstance(x, int | float | np.integer | np.floating)
  return is_number and not isinstance(x, bool) and math.isfinite(x)


def check_sinks(sinks_H: jax.Array, case: Case) -> jax.Array:
  """The sinks of `attend`; a ValueError if they are invalid."""
  sinks = _as_array(sinks_H)
  if not is_floating(sinks, (case.num_heads,)):
    raise ValueError(
      f"sinks must be [{case.num_heads}] numbers in floating point, one for"
      f" each query head, got {describe(sinks)}"
    )
  return jnp.asarray(sinks)


def patterns_of_heads(
  patterns: Pattern | str | Sequence[Pattern | str], num_heads: int, length: int
) -> tuple[Pattern, ...]:
  """The patterns of `attend`, one per head; a ValueError if any is invalid."""
  given = read_patterns(patterns)
  heads = given if isinstance(given, tuple) else (given,) * num_heads
  if len(heads) != num_heads:
    raise ValueError(
      f"{len(heads)} patterns for {num_heads} heads; pass one per head, or"
      " a single pattern for all"
    )
  for pattern in heads:
    pattern.check(length)
  return heads


def read_patterns(
  patterns: Pattern | str | Sequence[Pattern | str],
) -> Pattern | tuple[Pattern, ...]:
  """A pattern, or one per head; a ValueError if there is anything else."""
  if isinstance(patterns, tuple | list):
    return tuple(map(_pattern_of, patterns))
  return _pattern_of(patterns)


def _pattern_of(given):
  pattern = given
  if isinstance(given, str):
    if given.strip() in (*FACTORIZATIONS, *LAYOUTS):
      raise ValueError(
        f"{given!r} names the patterns of several layers: pass one layer's,"
        " from patterns.assign(...)"
      )
    heads = [head for factor in parse(given) for head in factor]
    if len(heads) > 1:
      raise ValueError(
        f"{shorten(given)!r} lists {len(heads)} patterns; pass a list, one per"
        " head"
      )
    (pattern,) = heads
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
