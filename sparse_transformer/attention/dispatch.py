"""`attend`: the entry point to attention."""

from typing import Literal, overload

import jax

from sparse_transformer import patterns as patterns_lib
from sparse_transformer.attention import dense, merged, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.patterns import Pattern


@overload
def attend(
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  patterns: Pattern | tuple[Pattern, ...],
  *,
  backend: str = ...,
  tile: int = ...,
  return_lse: Literal[False] = ...,
) -> jax.Array: ...


@overload
def attend(
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  patterns: Pattern | tuple[Pattern, ...],
  *,
  backend: str = ...,
  tile: int = ...,
  return_lse: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def attend(
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  patterns: Pattern | tuple[Pattern, ...],
  *,
  backend: str = "auto",
  tile: int = 0,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attention over the pairs of a pattern: softmax(q k^T / sqrt(K)) v.

  B = batch, L = M = n positions, H = heads, K = width of a head's queries and
  keys, E = width of its values. Scores and softmax are in float32 or wider. A
  query without keys gets output 0 and log-sum-exp -inf, and zero gradients.

  Args:
    q_BLHK: queries, floating point [batch, n, heads, K].
    k_BMHK: keys, shaped as the queries.
    v_BMHE: values [batch, n, heads, E].
    patterns: one pattern for all heads, or a tuple with one per head.
    backend: "auto" and "blocked" run tile by tile in linear memory, with the
      executor that suits the target platform; "dense" is the plain reference
      with n x n memory; any other is the name of an executor.
    tile: positions on a side of a tile; 0 chooses automatically.
    return_lse: whether to also return the log-sum-exp.

  Returns:
    out_BLHE in the dtype of the values. With `return_lse` also lse_BLH, the
    log-sum-exp of each query's scores in nats, float32 or wider.

  Raises:
    ValueError: shapes, patterns, tile or backend are invalid.
    Unsupported: the given backend cannot run this case.

  >>> import jax, jax.numpy as jnp
  >>> from sparse_transformer import patterns
  >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 1024, 4, 16))
  >>> attend(q, k, v, patterns.Local(64) | patterns.Strided(64)).shape
  (1, 1024, 4, 16)
  """
  heads = _patterns_of_heads(q_BLHK, k_BMHK, v_BMHE, patterns, tile)
  batch, length, num_heads, qk_width = q_BLHK.shape
  dtype, value_width = str(q_BLHK.dtype), v_BMHE.shape[-1]
  case = Case(batch, length, num_heads, qk_width, value_width, dtype)
  choices = registry.choose(backend, case)
  if choices == (("default", "dense"),):
    out, lse = dense.attend(q_BLHK, k_BMHK, v_BMHE, heads)
  else:
    out, lse = merged.attend(q_BLHK, k_BMHK, v_BMHE, heads, tile, choices)
  return (out, lse) if return_lse else out


def _patterns_of_heads(q_BLHK, k_BMHK, v_BMHE, patterns, tile):
  """Checks all arguments, and returns one pattern per head."""
  shapes = f"q {q_BLHK.shape}, k {k_BMHK.shape}, v {v_BMHE.shape}"
  if not q_BLHK.ndim == k_BMHK.ndim == v_BMHE.ndim == 4:
    raise ValueError(f"q, k, v must be [batch, n, heads, width], got {shapes}")
  if q_BLHK.shape != k_BMHK.shape or k_BMHK.shape[:3] != v_BMHE.shape[:3]:
    raise ValueError(
      "q and k must have the same shape, and v may differ in width only, got"
      f" {shapes}"
    )
  if tile < 0:
    raise ValueError(f"{tile=} must be positive, or 0 to choose one")
  num_heads = q_BLHK.shape[2]
  if isinstance(patterns, patterns_lib.Pattern):
    return (patterns,) * num_heads
  if len(patterns) != num_heads:
    raise ValueError(
      f"{len(patterns)} patterns for {num_heads} heads; pass one per head, or"
      " a single pattern for all"
    )
  return tuple(patterns)
