"""The arguments of `attend`: an invalid one is a ValueError of one line."""

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
  """The segments of queries and of keys, where they differ."""

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
    q_BLHK, k_BMGK, v_BMGE: as in `attend`, also without a batch axis.
    segments_BL: as in `attend`; or `Segments`, which are not checked.
    first: as in `attend`.

  Returns:
    Queries and keys with a batch axis, and `first` as an int32 or None.

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

  # From `adapters`, where the mask of a cache becomes segments.
  if isinstance(segments_BL, Segments):
    query_segments = segments_BL.of_queries[..., None]
    key_segments = segments_BL.of_keys[..., None]
    return Queries(q, query_segments), Keys(k, v, key_segments), first

  # [B, M, 1], with one head for all, so that segments are arranged, cut and
  # sent as arrays of keys are.
  segments = _check_segments(segments_BL, k.shape[is_unbatched:2])
  if is_unbatched:
    segments = segments[None]
  key_segments = query_segments = segments[..., None]
  if first is not None:
    query_segments = lax.dynamic_slice_in_dim(key_segments, first, length, 1)
  return Queries(q, query_segments), Keys(k, v, key_segments), first


def _find_fault(q, k, v, is_slice):
  """What is wrong with queries, keys and values; None if nothing is."""
  arrays = q, k, v
  if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays):
    return "q, k, v must be arrays"
  dtypes = [str(x.dtype) for x in arrays]
  if not set(dtypes) <= set(DTYPES) or dtypes[0] != dtypes[1]:
    known = ", ".join(DTYPES)
    return f"q, k, v must be among {known}, and q and k of the same dtype"

  if {x.ndim for x in arrays} not in ({3}, {4}):
    return "q, k, v must be [batch, n, heads, width], or all without batch"
  sizes = [size for x in arrays for size in x.shape[-3:]]
  if not all(isinstance(size, int) for size in sizes):
    return "only the batch may be symbolic"
  if not all(q.shape + v.shape):
    return "q, k, v must not be empty"

  *batch, length, num_heads, width = q.shape
  *key_batch, longest, num_key_heads, key_width = k.shape
  is_alike = key_batch == batch and key_width == width
  if not is_alike or k.shape[:-1] != v.shape[:-1]:
    return (
      "q and k must have the same shape but for heads, and v may differ from k"
      " in width only"
    )
  if length > longest or length < longest and not is_slice:
    return (
      f"q has {length} positions and k {longest}; cross-attention between"
      " sequences of different lengths is not supported; for queries at some"
      " positions of the keys, pass attend(..., first=), the position of the"
      " first query"
    )
  if num_heads % num_key_heads:
    return (
      f"the {num_key_heads} heads of k and v must divide the {num_heads} heads"
      " of q"
    )
  return None


def _check_segments(segments, shape):
  """Segments as int32; a ValueError unless they are integers of a shape."""
  x = segments
  if not isinstance(x, jax.Array):
    x = np.asarray(x)
  is_valid = x.shape == shape and x.dtype.kind in "iu"
  # Wrapped around, two documents might get one number.
  if is_valid and x.dtype.itemsize > 4:
    is_known = not isinstance(x, jax.core.Tracer)
    is_valid = is_known and np.array_equal(x, x.astype(np.int32))
  if not is_valid:
    raise ValueError(
      f"segments must be integers {list(shape)}, one for each position, got"
      f" {type_of(x)}; they must fit in 32 bits, and be of 32 bits if they are"
      " traced: number the documents"
    )
  return jnp.asarray(x, jnp.int32)


def is_floating(x: Any, shape: tuple[Any, ...]) -> bool:
  """Whether x is a floating-point array of a shape."""
  is_array = isinstance(x, jax.Array | np.ndarray) and x.shape == shape
  return is_array and jnp.issubdtype(x.dtype, jnp.floating)


def type_of(x: Any) -> str:
  """The dtype and shape of an array, or the type of another object."""
  if hasattr(x, "dtype"):
    return f"{x.dtype} {list(x.shape)}"
  return type(x).__name__


def check_index(name: str, index: Any, stop: int, why: str = "") -> Any:
  """The index, an int if it is not traced; a ValueError if it is invalid."""
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
  """The scores of `attend`; a ValueError if an argument is invalid."""
  try:
    factor = None if scale is None else float(scale)
    cap = float(softcap)
  except (TypeError, ValueError, OverflowError):
    factor = cap = math.nan  # which fails the check below, with its message

  # Within these bounds, float32 holds the products and quotients of both.
  sizes = [abs(x) for x in (factor or 0, cap)]
  if not all(x == 0 or 1e-18 <= x <= 1e18 for x in sizes) or cap < 0:
    # The repr of a traced number may have several lines.
    words = " ".join(f"{scale=} and {softcap=}".split())
    raise ValueError(
      f"{shorten(words)} must each be 0, or a number from 1e-18 to 1e18 in size"
      " that is known before tracing, and softcap not negative, 0 for none; for"
      " a traced scale, multiply q by it"
    )
  return Scores(factor, cap)


def check_sinks(sinks_H: jax.Array, num_heads: int) -> jax.Array:
  """The sinks of `attend`; a ValueError if they are invalid."""
  sinks = jnp.asarray(sinks_H)
  if not is_floating(sinks, (num_heads,)):
    raise ValueError(
      f"sinks must be [{num_heads}] numbers in floating point, one for each"
      f" query head, got {type_of(sinks)}"
    )
  return sinks


def check_bias(
  bias_HD: jax.Array, patterns: Sequence[Pattern], length: int, dtype: Any
) -> jax.Array:
  """The bias of `attend` to add to scores; a ValueError if it is invalid.

  Args:
    bias_HD: as in `attend`.
    patterns: of the query heads.
    length: number of keys, n.
    dtype: of the queries.
  """
  bias = jnp.asarray(bias_HD)
  # Odd, so that distance 0 is in the middle.
  least = 2 * length - 1
  size = max(least, bias.shape[-1] if bias.ndim else 0)
  if size % 2 == 0 or not is_floating(bias, (len(patterns), size)):
    raise ValueError(
      f"bias must be [{len(patterns)}, {least}] numbers in floating"
      " point, one for each query head and distance, or a larger odd number of"
      f" distances, got {type_of(bias)}"
    )

  for pattern in patterns:
    if pattern.contents():
      raise ValueError(f"{shorten(pattern)} is content-based: it takes no bias")
  return bias.astype(np.promote_types(dtype, np.float32))


def patterns_of_heads(
  patterns: Pattern | str | Sequence[Pattern | str], num_heads: int, length: int
) -> tuple[Pattern, ...]:
  """The patterns of `attend`, one per head; a ValueError if any is invalid."""
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
  """A pattern, or one per head; a ValueError if there is anything else."""
  if isinstance(patterns, tuple | list):
    return tuple(map(_pattern_of, patterns))
  return _pattern_of(patterns)


def _pattern_of(pattern):
  """A pattern, or the one that a text names."""
  if isinstance(pattern, Pattern):
    return pattern
  if not isinstance(pattern, str):
    raise ValueError(
      f"{shorten(repr(pattern))} is not a pattern: pass one, as a Pattern or as"
      " text, or a tuple with one per head"
    )
  named = [head for factor in parse(pattern) for head in factor]
  if len(named) > 1:
    raise ValueError(
      f"{shorten(pattern)!r} lists {len(named)} patterns; pass a list, one per"
      " head"
    )
  return named[0]


def check_tile(tile: int, length: int) -> int:
  """The tile, no larger than the smallest one that holds all positions."""
  if not isinstance(tile, int | np.integer) or tile < 0:
    raise ValueError(f"{tile=} must be a positive integer, or 0 to choose one")
  return contract.fit_tile(int(tile), length)
