"""Whether an executor computes, on this device, what plain XLA does."""

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
# The largest error by dtype, relative to the largest value of a head. In
# Pallas' interpreter, Triton's kernels show 0.008, 3e-6 and 0.0009.
TOLERANCES = {"bfloat16": 0.012, "float32": 2e-5, "float16": 0.002}
# The largest error of the log-sum-exp, absolute. Scores are accumulated in
# float32 whatever the dtype, and one wrong pair in 5,000 exceeds this.
LSE_TOLERANCE = 1e-4
# By default, JAX rounds products in float32 on accelerators.
PRECISION = {"float32": "highest"}
# Of the sequences in a batch: the factor of the queries, and the factor of the
# tolerances, as rounding errors grow with the scores. In the last one, one pair
# too many or too few exceeds the tolerances: all weigh about the same.
SCORES, ALLOWED = (32, 1, 1 / 8), (5, 1, 1)
# Positions between which "dense" computes all pairs: no multiple of a tile, but
# even, since JAX has no gradients of cuDNN's at odd lengths.
SMALL = 518


class Report(NamedTuple):
  """What `verify` found."""

  executor: str
  faults: tuple[str, ...]  # a phrase for each thing that is wrong


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
  """Compares what `attend` runs on this device with plain XLA in float32.

  Outputs, log-sum-exp and gradients must agree: at few positions with those of
  "dense", and at n with those of "batched". Content-based pairs are not
  checked. A kernel that hangs or crashes does so in your process.

  Args:
    patterns: those of `attend`.
    shape: of the queries of a sequence, [n, heads, K].
    dtype: of queries, keys and values.
    key_heads: heads of keys and values; 0 for as many as of queries.
    value_width: width of a head's values; 0 for K.
    packed: whether there are segments, as of packed documents.
    backend: that of `attend`.

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
  """`verify` of what `attend` may be asked on this device."""
  dtype = request.dtype
  name = registry.resolve(backend, request)
  has_lse = _has_lse(name, request)
  packed = request.segments

  faults: list[str] = []
  static = binding.static_parts(request.patterns)
  plain_of = {min(request.length, SMALL): "dense"}
  if request.length > SMALL:
    plain_of[request.length] = "batched"
  for length, plain in plain_of.items() if static else ():
    sizes = request.qk_width, request.value_width, request.num_key_heads
    inputs: Any = draw(static, length, sizes, dtype)
    arguments.check_arrays(*inputs[:3])
    exact = [x.astype(np.promote_types(x.dtype, np.float32)) for x in inputs]
    try:
      with jax.default_matmul_precision("highest"):
        expected = jax.device_get(run(exact, static, plain, packed, has_lse))
      with jax.default_matmul_precision(PRECISION.get(dtype)):
        results = jax.device_get(run(inputs, static, name, packed, has_lse))
      _, wrong = compare(results, expected, dtype)
    except Exception as error:  # whatever a compiler or a device raises
      words = " ".join(str(error).split())
      wrong = [shorten(f"{type(error).__name__}: {words}")]
    faults += [f"{fault} at n = {length:,}" for fault in wrong]
  return Report(executor=name, faults=tuple(faults))


def _has_lse(name, request):
  """Whether what runs a request would also return the log-sum-exp."""
  with_lse = dataclasses.replace(request, lse=True)
  executor = registry.EXECUTORS.get(name)
  return executor is None or executor.unsupported(with_lse) is None


@functools.partial(jax.jit, static_argnums=(1, 2, 3, 4))
def run(
  inputs: Any, heads: Any, backend: str, packed: bool, has_lse: bool
) -> tuple[jax.Array, ...]:
  """(out, lse, dq, dk, dv) of inputs of `draw`; lse is 0 if -inf or unknown."""
  q, k, v, dout, dlse = inputs
  at_1L = np.arange(q.shape[1])[None] * 2 // q.shape[1]
  segments_BL = at_1L.repeat(len(q), 0) if packed else None
  settings: Any = dict(segments_BL=segments_BL, backend=backend)

  def attention(q, k, v):
    if not has_lse:
      return attend(q, k, v, heads, **settings), 0 * dlse
    out, lse = attend(q, k, v, heads, return_lse=True, **settings)
    return out, jnp.where(lse == -jnp.inf, 0, lse)

  results, vjp = jax.vjp(attention, q, k, v)
  return *results, *vjp((dout, dlse))


def draw(
  heads: Sequence[Pattern], n: int, sizes: tuple[int, int, int], dtype: str
) -> tuple[np.ndarray, ...]:
  """q, k, v and the cotangents of out and lse; sizes are K, E and G."""
  k, e, key_heads = sizes
  batch, num_heads = len(SCORES), len(heads)
  rng = np.random.default_rng(n)

  def draw_normal(*shape: int) -> np.ndarray:
    return rng.standard_normal(size=shape, dtype=np.float32)

  q = draw_normal(batch, n, num_heads, k)
  key = draw_normal(batch, n, key_heads, k)
  value = draw_normal(batch, n, key_heads, e)
  dout = draw_normal(batch, n, num_heads, e)
  dlse = draw_normal(batch, n, num_heads)
  q *= np.array(SCORES, np.float32)[:, None, None, None]

  # In the last sequence, weights are about 1 / number of keys; with cotangents
  # times that, all rows count alike. The gradient of lse exceeds those of the
  # weights, so that gradients of scores are not near zero by chance.
  counts = {x: analysis.keys_per_query(x, n) for x in {*heads}}
  counts_LH = np.stack([counts[x] for x in heads], axis=1)
  # Where rows have many keys, float16 does not hold as much.
  limit = np.finfo(np.float16).max if dtype == "float16" else np.inf
  dout[-1] = (dout[-1] * counts_LH[:, :, None]).clip(-limit, limit)
  dlse[-1] = np.sign(dlse[-1]) * counts_LH * (4 * np.sqrt(e))

  narrow = (x.astype(jnp.dtype(dtype)) for x in (q, key, value, dout))
  return *narrow, dlse


def compare(
  found: Sequence[Any], expected: Sequence[Any], dtype: str
) -> tuple[dict[str, float], list[str]]:
  """The error of each result of `run`, and a phrase for each that is wrong.

  Errors are relative to the largest value of a head, or absolute for lse, over
  the factor in `ALLOWED`.
  """
  errors, faults = {}, []
  for name, x, y in zip(NAMES, found, expected, strict=True):
    axes = (1, *range(3, y.ndim))
    with np.errstate(all="ignore"):  # wrong results may be infinite, or NaN
      error = np.abs(np.asarray(x).astype(np.float64) - y).max(axes)
      if name != "lse":
        error /= np.maximum(np.abs(y).max(axes), 1e-6)
      errors[name] = float((error / np.array(ALLOWED)[:, None]).max())
    limit = LSE_TOLERANCE if name == "lse" else TOLERANCES.get(dtype, 2e-5)
    if not errors[name] <= limit:
      faults.append(f"error of {name} {errors[name]:.2g}, above {limit:g}")
  return errors, faults
