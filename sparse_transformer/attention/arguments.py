"""Checks of the arguments of `attend`, which raise a one-line ValueError."""

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sparse_transformer.attention import contract
from sparse_transformer.attention.contract import Keys, Queries, Scores
from sparse_transformer.patterns import Pattern, parse, shorten

DTYPES = "bfloat16", "float16", "float32", "float64"


class Segments(NamedTuple):
  """Separate segment IDs of queries and of keys."""

  of_queries: jax.Array  # [B, L]
  of_keys: jax.Array  # [B, M]


def check_arrays(
  q_BLHK: jax.Array,
  k_BMGK: jax.Array,
  v_BMGE: jax.Array,
  segments_BL: jax.Array | Segments | None = None,
  first: jax.Array | int | None = None,
) -> tuple[Queries, Keys, jax.Array | None]:
  """Checks the arrays of `attend`.

  Args:
    q_BLHK, k_BMGK, v_BMGE: as in `attend`, with or without a batch axis.
    segments_BL: as in `attend`, or `Segments`, which are not checked.
    first: as in `attend`.

  Returns:
    Queries and keys with a batch axis, and `first` as an int32 scalar or None.

  Raises:
    ValueError: a dtype, a shape or a value is invalid.
  """
  arrays = dict(q=q_BLHK, k=k_BMGK, v=v_BMGE)
  fault = _find_fault(q_BLHK, k_BMGK, v_BMGE, is_slice=first is not None)
  if fault is not None:
    types = ", ".join(f"{name} {type_of(x)}" for name, x in arrays.items())
    raise ValueError(f"{fault}, got {types}")

  is_unbatched = q_BLHK.ndim == 3
  q, k, v = map(jnp.asarray, arrays.values())
  if is_unbatched:
    q, k, v = q[None], k[None], v[None]
  length = q.shape[1]
  longest = k.shape[1]
  if first is not None:
    why = f", since q has {length} of the {longest} positions of k"
    first = check_index("first", first, longest - length + 1, why)
    first = jnp.asarray(first, jnp.int32)

  if segments_BL is None:
    return Queries(q), Keys(k, v), first

  # `adapters` passes `Segments`, into which it converts the mask of a cache.
  if isinstance(segments_BL, Segments):
    query_segments = segments_BL.of_queries[..., None]
    key_segments = segments_BL.of_keys[..., None]
    return Queries(q, query_segments), Keys(k, v, key_segments), first

  # Segments become [B, M, 1], with one head for all, so that they can be
  # arranged, cut and sent like arrays of keys.
  segments = _check_segments(segments_BL, k.shape[is_unbatched:2])
  if is_unbatched:
    segments = segments[None]
  key_segments = query_segments = segments[..., None]
  if first is not None:
    query_segments = lax.dynamic_slice_in_dim(key_segments, first, length, 1)
  return Queries(q, query_segments), Keys(k, v, key_segments), first


def _find_fault(q, k, v, is_slice):
  """Returns what is wrong with queries, keys and values, or None."""
  arrays = q, k, v
  if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays):
    return "q, k, v must be arrays"
  dtypes = [str(x.dtype) for x in arrays]
  if not set(dtypes) <= set(DTYPES) or dtypes[0] != dtypes[1]:
    known = ", ".join(DTYPES)
    return f"q, k, v must be {known}, and q and k must have the same dtype"

  if {x.ndim for x in arrays} not in ({3}, {4}):
    return "q, k, v must be [batch, n, heads, width], or all without batch"
  sizes = [size for x in arrays for size in x.shape[-3:]]
  if not all(isinstance(size, int) for size in sizes):
    return "only the batch size may be symbolic"
  if not all(q.shape + v.shape):
    return "q, k, v must not be empty"

  *batch, length, num_heads, width = q.shape
  *key_batch, longest, num_key_heads, key_width = k.shape
  is_alike = key_batch == batch and key_width == width
  if not is_alike or k.shape[:-1] != v.shape[:-1]:
    return (
      "q and k must have the same shape except for heads, and v may differ from"
      " k only in width"
    )
  if length > longest or length < longest and not is_slice:
    return (
      f"q has {length} positions and k has {longest}; cross-attention between"
      " sequences of different lengths is not supported; if the queries are at"
      " some positions of the keys, pass the position of the first query,"
      " attend(..., first=)"
    )
  if num_heads % num_key_heads:
    return (
      f"the {num_key_heads} heads of k and v must divide the {num_heads} heads"
      " of q"
    )
  return None


def _check_segments(segments, shape):
  """Returns segments as int32. Raises ValueError if they are invalid."""
  x = segments
  if not isinstance(x, jax.Array):
    x = np.asarray(x)
  is_valid = x.shape == shape and x.dtype.kind in "iu"
  # If larger integers wrapped around, two documents could get the same ID.
  if is_valid and x.dtype.itemsize > 4:
    is_known = not isinstance(x, jax.core.Tracer)
    is_valid = is_known and np.array_equal(x, x.astype(np.int32))
  if not is_valid:
    raise ValueError(
      f"segments must be an integer array of shape {list(shape)}, with one ID"
      f" for each position, got {type_of(x)}; IDs must fit in 32 bits, and in a"
      " traced function the dtype must have at most 32 bits; number the"
      " documents from 0"
    )
  return jnp.asarray(x, jnp.int32)


def is_floating(x: Any, shape: tuple[Any, ...]) -> bool:
  """Returns whether x is a floating-point array of the given shape."""
  is_array = isinstance(x, jax.Array | np.ndarray) and x.shape == shape
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)


def type_of(x: Any) -> str:
  """Returns the dtype and shape of an array, or the type of other objects."""
  if hasattr(x, "dtype"):
    return f"{x.dtype} {list(x.shape)}"
  return type(x).__name__


def check_index(name: str, index: Any, stop: int, why: str = "") -> Any:
  """Checks an index, and returns it as an int unless it is traced.

  Raises ValueError if it is not an integer from 0 to `stop` - 1. `why` is
  appended to the error message.
  """
  try:
    if isinstance(index, jax.core.Tracer):
      if index.shape or index.dtype.kind not in "iu":
        raise TypeError
      return index
    index = operator.index(index)
  except TypeError:
    raise ValueError(
      f"{name}={shorten(' '.join(str(index).split()))} must be an integer; for"
      " sequences at different positions, use jax.vmap"
    ) from None
  if not 0 <= index < stop:
    raise ValueError(f"{name}={index} must lie between 0 and {stop - 1}{why}")
  return index


def check_scores(scale: float | None, softcap: float) -> Scores:
  """Returns the `Scores` of `attend`. Raises ValueError if one is invalid."""
  try:
    factor = None if scale is None else float(scale)
    cap = float(softcap)
  except (TypeError, ValueError, OverflowError):
    factor = cap = math.nan  # NaN fails the check below, which raises the error

  # Within these bounds, products and quotients of the two fit in float32.
  sizes = [abs(x) for x in (factor or 0, cap)]
  if not all(x == 0 or 1e-18 <= x <= 1e18 for x in sizes) or cap < 0:
    # The repr of a traced number may have several lines.
    words = " ".join(f"{scale=} and {softcap=}".split())
    raise ValueError(
      f"{shorten(words)} must each be 0, or have an absolute value from 1e-18"
      " to 1e18; softcap must not be negative; both must be known before"
      " tracing (to use a traced scale, multiply q by it)"
    )
  return Scores(factor, cap)


def check_sinks(sinks_H: jax.Array, num_heads: int) -> jax.Array:
  """Returns the sinks of `attend`. Raises ValueError if they are invalid."""
  sinks = jnp.asarray(sinks_H)
  if not is_floating(sinks, (num_heads,)):
    raise ValueError(
      f"sinks must be a floating-point array of shape [{num_heads}], one number"
      f" for each query head, got {type_of(sinks)}"
    )
  return sinks


def check_bias(
  bias_HD: jax.Array, patterns: Sequence[Pattern], length: int, dtype: Any
) -> jax.Array:
  """Checks the bias of `attend`, and converts it to the dtype of scores.

  Args:
    bias_HD: as in `attend`.
    patterns: the patterns of the query heads.
    length: number of keys, n.
    dtype: the dtype of the queries.

  Returns:
    The bias [H, distances], in the dtype of the queries or float32, whichever
    is wider.

  Raises:
    ValueError: the bias is invalid, or a pattern is content-based.
  """
  bias = jnp.asarray(bias_HD)
  # The size is odd, so that distance 0 is in the middle.
  least = 2 * length - 1
  size = max(least, bias.shape[-1] if bias.ndim else 0)
  if size % 2 == 0 or not is_floating(bias, (len(patterns), size)):
    raise ValueError(
      f"bias must be a floating-point array of shape [{len(patterns)},"
      f" {least}], one number for each query head and distance, or with a"
      f" larger odd number of distances, got {type_of(bias)}"
    )

  for pattern in patterns:
    if pattern.contents():
      raise ValueError(
        f"{shorten(pattern)} is content-based, so attend cannot add a bias"
      )
  return bias.astype(np.promote_types(dtype, np.float32))


def patterns_of_heads(
  patterns: Pattern | str | Sequence[Pattern | str], num_heads: int, length: int
) -> tuple[Pattern, ...]:
  """Returns the patterns of `attend`, one per head.

  Raises ValueError if a pattern is invalid, or if the number of patterns
  differs from the number of heads.
  """
  heads = read_patterns(patterns)
  if not isinstance(heads, tuple):
    heads = (heads,) * num_heads
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
  """Reads a single pattern, or a sequence with one pattern per head.

  Raises ValueError if an item is neither a `Pattern` nor an expression for one.
  """
  if isinstance(patterns, tuple | list):
    return tuple(map(_pattern_of, patterns))
  return _pattern_of(patterns)


def _pattern_of(pattern):
  """Returns a pattern, or reads it from text."""
  if isinstance(pattern, Pattern):
    return pattern
  if not isinstance(pattern, str):
    raise ValueError(
      f"{shorten(repr(pattern))} is not a pattern: pass a Pattern, its text, or"
      " a tuple with one of these per head"
    )
  named = [head for factor in parse(pattern) for head in factor]
  if len(named) > 1:
    raise ValueError(
      f"{shorten(pattern)!r} lists {len(named)} patterns; pass a list, one per"
      " head"
    )
  return named[0]


def check_tile(tile: int, length: int) -> int:
  """Checks a tile size, and reduces it if the sequence is shorter.

  The result is at most the size of the smallest tile that contains all
  positions.
  """
  if not isinstance(tile, int | np.integer) or tile < 0:
    raise ValueError(f"{tile=} must be a positive integer, or 0 to choose one")
  return contract.fit_tile(int(tile), length)
