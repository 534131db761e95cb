"""Checks that a backend agrees with plain XLA on this device."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sparse_transformer.attention import arguments, platforms, registry
from sparse_transformer.attention.content import binding
from sparse_transformer.attention.contract import Request
from sparse_transformer.attention.dispatch import attend
from sparse_transformer.patterns import Pattern, analysis, shorten

NAMES = "out", "lse", "dq", "dk", "dv"
# The largest allowed error for each dtype, relative to the largest value of a
# head. In the Pallas interpreter, the errors of the Triton kernels are 0.008,
# 3e-6 and 0.0009.
TOLERANCES = {"bfloat16": 0.012, "float32": 2e-5, "float16": 0.002}
# The largest allowed absolute error of the log-sum-exp. It is small, because
# scores are accumulated in float32 for every dtype. A single wrong pair in
# 5,000 exceeds it.
LSE_TOLERANCE = 1e-4
# By default, JAX computes products of float32 with lower precision on
# accelerators.
PRECISION = {"float32": "highest"}
# For each sequence in a batch, the factor of the queries, and the factor of the
# tolerances, because rounding errors grow with the scores. In the last
# sequence, all pairs have about the same weight, so that a single missing or
# extra pair exceeds the tolerances.
SCORES = 32, 1, 1 / 8
ALLOWED = 5, 1, 1
# The number of positions for a comparison with "dense", which computes all
# pairs. It is not a multiple of a tile, but even, because JAX has no gradients
# of cuDNN attention at odd lengths.
SMALL = 518


class Report(NamedTuple):
  """The result of `verify`."""

  backend: str
  faults: tuple[str, ...]  # a phrase for each difference that was found


def verify(
  patterns: Pattern | str | Sequence[Pattern | str],
  shape: tuple[int, int, int],
  dtype: Any = "float32",
  *,
  key_heads: int = 0,
  value_width: int = 0,
  packed: bool = False,
  backend: str = "auto",
) -> Report:
  """Compares `attend` on this device with plain XLA in float32.

  Outputs, log-sum-exps and gradients are compared with those of "dense", for n
  positions but at most 518. If n is larger than 518, they are also compared
  with those of "batched", for n positions. Content-based pairs are not checked.
  Kernels run in the calling process, so a kernel that hangs or crashes takes
  the process with it.

  Args:
    patterns: as in `attend`.
    shape: shape of the queries of one sequence, [n, heads, K].
    dtype: dtype of queries, keys and values.
    key_heads: number of KV heads; 0 for the number of query heads.
    value_width: width E of a head's values; 0 for K.
    packed: whether to use segments, as for packed documents.
    backend: as in `attend`.

  Returns:
    A `Report`. Its `faults` are empty if all results agree.

  Raises:
    ValueError: an argument is invalid.
    Unsupported: the backend cannot run this case.
  """
  n, num_heads, width = shape
  dtype = jnp.dtype(dtype).name
  request = Request(
    patterns=arguments.patterns_of_heads(patterns, num_heads, n),
    batch=1,
    length=n,
    num_key_heads=key_heads or num_heads,
    qk_width=width,
    value_width=value_width or width,
    dtype=dtype,
    value_dtype=dtype,
    platform=platforms.current_platform(),
    segments=packed,
  )
  return verify_request(request, backend)


def verify_request(request: Request, backend: str = "auto") -> Report:
  """Does the same as `verify`, for a request.

  Args:
    request: the request. Its content-based parts and its split are ignored.
    backend: as in `attend`.
  """
  name = registry.resolve(backend, request)
  request = dataclasses.replace(
    request,
    patterns=binding.static_parts(request.patterns),
    lse=_has_lse(name, request),
  )
  if not request.patterns:
    return Report(backend=name, faults=())

  # "dense" is the definition, but needs n x n memory. For longer sequences,
  # "batched" replaces it.
  faults: list[str] = []
  plain_of = {min(request.length, SMALL): "dense"}
  if request.length > SMALL:
    plain_of[request.length] = "batched"
  for n, plain in plain_of.items():
    asked = dataclasses.replace(request, length=n)
    inputs: Any = draw(asked)
    q, k, v, _, _ = inputs
    arguments.check_arrays(q, k, v)
    exact = tuple(
      x.astype(np.promote_types(x.dtype, np.float32)) for x in inputs
    )

    # Both get the same rounded inputs, so that they differ only in how they
    # compute.
    try:
      with jax.default_matmul_precision("highest"):
        expected = jax.device_get(run(exact, asked, plain))
      with jax.default_matmul_precision(PRECISION.get(request.dtype)):
        results = jax.device_get(run(inputs, asked, name))
      _, wrong = compare(results, expected, request.dtype)
    except Exception as error:  # compilers and devices may raise any error
      words = " ".join(str(error).split())
      wrong = [shorten(f"{type(error).__name__}: {words}")]
    faults += [f"{fault} at n = {n:,}" for fault in wrong]
  return Report(backend=name, faults=tuple(faults))


def _has_lse(name, request):
  """Returns whether the backend could also return the log-sum-exp."""
  with_lse = dataclasses.replace(request, lse=True)
  backend = registry.BACKENDS.get(name)
  return backend is None or backend.unsupported(with_lse) is None


@functools.partial(jax.jit, static_argnums=(1, 2))
def run(
  inputs: tuple[Any, ...], request: Request, backend: str
) -> tuple[jax.Array, ...]:
  """Computes (out, lse, dq, dk, dv) for inputs from `draw`.

  In lse, 0 replaces -inf. All of lse is 0 if the request does not return it.
  """
  q, k, v, dout, dlse = inputs
  batch, n = q.shape[:2]
  segments_BL: Any = None
  if request.segments:
    halves = np.arange(n) * 2 // n
    segments_BL = np.tile(halves, (batch, 1))

  def attention(q, k, v):
    results = attend(
      q,
      k,
      v,
      request.patterns,
      segments_BL=segments_BL,
      backend=backend,
      return_lse=request.lse,
    )
    if not request.lse:
      return results, 0 * dlse
    out, lse = results
    return out, jnp.where(lse == -jnp.inf, 0, lse)

  results, vjp = jax.vjp(attention, q, k, v)
  out, lse = results
  dq, dk, dv = vjp((dout, dlse))
  return out, lse, dq, dk, dv


def draw(request: Request) -> tuple[np.ndarray, ...]:
  """Draws the inputs of `run` for a request, three sequences in all.

  The sequences have scores of different magnitudes, see `SCORES`.

  Returns:
    q, k, v and the cotangents of out and lse, [3, n, H, ...] in natural order.
  """
  batch = len(SCORES)
  n = request.length
  num_heads = request.num_heads
  key_heads = request.num_key_heads
  width = request.value_width
  rng = np.random.default_rng(n)

  # Numbers are drawn in float32 even for other dtypes, so that all dtypes get
  # the same numbers, up to rounding.
  def draw_normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(size=shape, dtype=np.float32)

  q = draw_normal(
    batch,
    n,
    num_heads,
    request.qk_width,
  )
  k = draw_normal(
    batch,
    n,
    key_heads,
    request.qk_width,
  )
  v = draw_normal(batch, n, key_heads, width)
  dout = draw_normal(batch, n, num_heads, width)
  dlse = draw_normal(batch, n, num_heads)
  q *= np.array(SCORES, np.float32).reshape(-1, 1, 1, 1)

  # In the last sequence, weights are about 1 / number of keys. Cotangents are
  # multiplied by the number of keys, so that all rows count alike. The
  # cotangent of lse exceeds the gradients of the weights, so that gradients of
  # scores are not near zero by chance.
  counts = {}
  for pattern in set(request.patterns):
    counts[pattern] = analysis.keys_per_query(pattern, n)
  by_head = [counts[pattern] for pattern in request.patterns]
  counts_LH = np.stack(by_head, axis=1)

  # If rows have many keys, scaled cotangents may not fit in float16.
  limit = np.inf
  if request.dtype == "float16":
    limit = float(np.finfo(np.float16).max)
  scaled = dout[-1] * counts_LH[:, :, None]
  dout[-1] = scaled.clip(-limit, limit)
  signs = np.sign(dlse[-1])
  dlse[-1] = signs * counts_LH * (4 * np.sqrt(width))

  dtype = jnp.dtype(request.dtype)
  q, k, v, dout = (x.astype(dtype) for x in (q, k, v, dout))
  return q, k, v, dout, dlse


def compare(
  results: Sequence[Any], expected: Sequence[Any], dtype: str
) -> tuple[dict[str, float], list[str]]:
  """Returns the error of each result of `run`, and a phrase for each fault.

  Errors are relative to the largest absolute value of a head; errors of lse are
  absolute. All errors are then divided by the factor of their sequence in
  `ALLOWED`.
  """
  errors = {}
  faults = []
  for name, x, y in zip(NAMES, results, expected, strict=True):
    # Maxima are taken over all axes except sequences and heads, so that each
    # sequence and head must be right by itself.
    axes = (1, *range(3, y.ndim))
    limit = TOLERANCES.get(dtype, 2e-5)
    with np.errstate(all="ignore"):  # wrong results may be infinite or NaN
      difference = np.asarray(x).astype(np.float64) - y
      error = np.abs(difference).max(axes)
      if name == "lse":
        limit = LSE_TOLERANCE
      else:
        largest = np.abs(y).max(axes)
        error /= np.maximum(largest, 1e-6)
      error /= np.array(ALLOWED)[:, None]
      errors[name] = float(error.max())
    if not errors[name] <= limit:
      faults.append(f"error of {name} {errors[name]:.2g}, above {limit:g}")
  return errors, faults
