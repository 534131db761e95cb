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
  PUBLISHED,
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
  is_unbatched = _check_kinds(q=q_BLHK, k=k_BMGK, v=v_BMGE)
  arrays = [jnp.asarray(x) for x in (q_BLHK, k_BMGK, v_BMGE)]
  q, k, v = (x[None] for x in arrays) if is_unbatched else arrays
  at = _check_shapes(q, k, v, first)
  if segments_BL is None:
    return Queries(q), Keys(k, v), at
  if isinstance(segments_BL, Segments):
    of_queries, of_keys = (x[..., None] for x in segments_BL)
    return Queries(q, of_queries), Keys(k, v, of_keys), at
  segments = _check_segments(segments_BL, k.shape[is_unbatched:2])
  segments = segments[None] if is_unbatched else segments
  of_keys = of_queries = segments[..., None]
  if at is not None:
    of_queries = lax.dynamic_slice_in_dim(of_keys, at, q.shape[1], 1)
  return Queries(q, of_queries), Keys(k, v, of_keys), at


def _check_kinds(**arrays):
  """Whether the batch axis is missing; a ValueError if they are no arrays."""
  for name, x in arrays.items():
    if not isinstance(x, jax.Array | np.ndarray):
      raise ValueError(f"{name} must be an array, got {type(x).__name__}")
  kinds = [str(x.dtype) for x in arrays.values()]
  if not {*kinds} <= {*DTYPES} or kinds[0] != kinds[1]:
    found = ", ".join(map(" ".join, zip(arrays, kinds, strict=True)))
    raise ValueError(
      f"q, k, v must be among {', '.join(DTYPES)}, and q and k of the same"
      f" dtype, got {found}"
    )
  if {x.ndim for x in arrays.values()} not in ({3}, {4}):
    raise ValueError(
      "q, k, v must be [batch, n, heads, width], or all without batch, got"
      f" {_shapes(*arrays.values())}"
    )
  return arrays["q"].ndim == 3


def _shapes(q, k, v):
  return f"q {q.shape}, k {k.shape}, v {v.shape}"


def _check_shapes(q, k, v, first):
  """The first position; a ValueError if shapes do not fit."""
  if not all(isinstance(i, int) for x in (q, k, v) for i in x.shape[1:]):
    raise ValueError(f"only the batch may be symbolic, got {_shapes(q, k, v)}")
  if not all((*q.shape, *v.shape, k.shape[2])):
    raise ValueError(f"q, k, v must not be empty, got {_shapes(q, k, v)}")
  (batch, n, num_heads, width), (_, longest, num_key_heads, _) = (
    q.shape,
    k.shape,
  )
  if k.shape[:3] != v.shape[:3] or k.shape[::3] != (batch, width):
    raise ValueError(
      "q and k must have the same shape but for heads, and v may differ from k"
      f" in width only, got {_shapes(q, k, v)}"
    )
  if n > longest or (first is None and n != longest):
    raise ValueError(
      f"q has {n} positions and k {longest}; cross-attention between sequences"
      " of different lengths is not supported; for queries at some positions of"
      " the keys, pass attend(..., first=), the position of the first query"
    )
  if num_heads % num_key_heads:
    raise ValueError(
      f"the {num_key_heads} heads of k and v must divide the {num_heads} heads"
      f" of q, got {_shapes(q, k, v)}"
    )
  if first is None:
    return None
  why = f", since q has {n} of the {longest} positions of k"
  return jnp.asarray(
    check_index("first", first, longest - n + 1, why), jnp.int32
  )


def _check_segments(given, shape):
  """Segments as int32; a ValueError unless they are integers of a shape."""
  x = _as_array(given)
  is_valid = getattr(x, "shape", None) == shape and x.dtype.kind in "iu"
  if is_valid and isinstance(x, np.ndarray):
    is_valid = np.array_equal(x, x.astype(np.int32))
  if not is_valid:
    raise ValueError(
      f"segments must be integers {list(shape)}, one for each position, got"
      f" {describe(x)}; they must fit in 32 bits: number the documents"
    )
  return jnp.asarray(x, jnp.int32)


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
  factor, cap = _number_of(scale), _number_of(softcap)
  if scale is not None and factor is None:
    raise ValueError(
      f"{scale=} must be a finite number known before tracing; multiply q by"
      " another"
    )
  if cap is None or cap < 0:
    raise ValueError(
      f"{softcap=} must be a number above 0 known before tracing, or 0 for none"
    )
  return Scores(factor, cap)


def _number_of(x):
  """A finite real number that is known; None for anything else."""
  is_scalar = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
  if is_scalar and not x.shape and x.dtype != bool:
    x = float(x)
  is_number = isinstance(x, int | float | np.integer | np.floating)
  if not is_number or isinstance(x, bool) or not math.isfinite(x):
    return None
  return float(x)


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
  if isinstance(given, Pattern):
    return given
  if not isinstance(given, str):
    raise ValueError(
      f"{shorten(repr(given))} is not a pattern: pass one, as a Pattern or as"
      " text, or a tuple with one per head"
    )
  if given.strip() in (*FACTORIZATIONS, *PUBLISHED):
    raise ValueError(
      f"{given!r} names the patterns of several layers: pass one layer's,"
      " from patterns.assign(...)"
    )
  pattern, *others = (head for factor in parse(given) for head in factor)
  if others:
    raise ValueError(
      f"{shorten(given)!r} lists {1 + len(others)} patterns; pass a list, one"
      " per head"
    )
  return pattern


def check_tile(tile: int, length: int) -> int:
  """The tile, no larger than the smallest one that holds all positions."""
  is_integer = isinstance(tile, int | np.integer)
  if not is_integer or isinstance(tile, bool) or tile < 0:
    raise ValueError(f"{tile=} must be a positive integer, or 0 to choose one")
  return min(int(tile), max(32, 1 << (length - 1).bit_length()))
