"""Layer norms of the residual stream, fused with the end of a residual branch.

XLA reads the stream once for its mean and variance, and again to normalize it.
On NVIDIA GPUs, one kernel instead computes the dropout and the residual sum
that end a branch, and the norm that follows. Another kernel computes their
gradients; see `norm_kernels`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from sparse_transformer.attention import platforms, registry
from sparse_transformer.model import sharding
from sparse_transformer.model.dropout import WORD, draw, drop

NAME = "fused_norm"  # the name of the kernels in `registry.avoid`
DTYPES = "bfloat16", "float16", "float32"
# The largest error in float32, relative to the largest value; in 16 bits, two
# units of rounding.
MIN_TOLERANCE = 2e-5
MAX_WIDTH = 8192  # of the stream: a row has to fit into registers


def normalize(
  x_BLD: jax.Array, norm: nnx.LayerNorm, is_fused: bool
) -> jax.Array:
  """Applies a layer norm to the stream; arguments as in `add_and_normalize`."""
  _, h_BLD = add_and_normalize(x_BLD, None, None, 0.0, norm, is_fused)
  return h_BLD


def add_and_normalize(
  x_BLD: jax.Array,
  y_BLD: jax.Array | None,
  words_BWD: jax.Array | None,
  rate: float,
  norm: nnx.LayerNorm,
  is_fused: bool,
  interpret: bool = False,
) -> tuple[Any, jax.Array]:
  """Adds a residual branch to the stream, and normalizes the sum.

  Args:
    x_BLD: the residual stream, rounded to the dtype of products.
    y_BLD: the output of the branch before dropout, or None without a branch.
    words_BWD: a bit mask of the dropped values of y, as `dropout.draw` returns
      it; None drops no values.
    rate: the dropout rate that was passed to `draw`.
    norm: the layer norm. Its parameters are float32, and it sums in float32.
    is_fused: whether to use the kernels; see `unsupported`.
    interpret: whether Pallas interprets the kernels, on any platform.

  Returns:
    (a_BLD, h_BLD). a_BLD is the branch after dropout, in float32, or None
    without a branch. h_BLD is the norm of x + a, in the dtype of x. The sum x +
    a is not rounded before it is normalized.
  """
  if not is_fused:
    return _add_and_normalize_plainly(x_BLD, y_BLD, words_BWD, rate, norm)

  kernels = _kernels()
  settings = kernels.Settings(norm.epsilon, rate, interpret)
  branch = kernels.Branch(y_BLD, words_BWD)
  params: Any = norm
  return kernels.run(
    settings, x_BLD, branch, params.scale[...], params.bias[...]
  )


def _kernels():
  """Imports the module with the kernels, which needs Pallas."""
  from sparse_transformer.model import norm_kernels

  return norm_kernels


def unsupported(
  x_BLD: jax.Array | jax.ShapeDtypeStruct, remat: str
) -> str | None:
  """Returns why the kernels cannot normalize the stream, or None if they can.

  Args:
    x_BLD: the stream, or its shape and dtype.
    remat: what the backward pass recomputes, one of `schema.REMATS`.
  """
  if platforms.current_platform() != "cuda":
    return "they need an NVIDIA GPU"
  if reason := registry.avoided().get(NAME):
    return reason
  if lacking := platforms.lacks(_kernels):
    return lacking
  if old := platforms.before_ampere():
    return old
  if remat == "block":
    # The kernels need a copy of each layer's stream. XLA instead reads it in
    # place, from the array that contains the streams of all layers.
    return "they need more memory, and model.remat=block asks for the least"

  if x_BLD.dtype.name not in DTYPES:
    return f"they support {', '.join(DTYPES)}, got {x_BLD.dtype.name}"
  _, length, width = x_BLD.shape
  if not all(isinstance(size, int) for size in x_BLD.shape):
    return "they do not support symbolic sizes"
  if width > MAX_WIDTH:
    return f"they support widths up to {MAX_WIDTH:,}, got {width:,}"

  # A word of dropout bits must not span two devices.
  devices = sharding.size(["sequence"])
  if length % devices == 0 and (length // devices) % WORD and devices > 1:
    return f"they need a multiple of {WORD} positions on each device"
  return None


def explain_choice(x_BLD: jax.Array | jax.ShapeDtypeStruct, remat: str) -> str:
  """Names the implementation of norms; if it is plain XLA, says why."""
  reason = unsupported(x_BLD, remat)
  return f"plain XLA; not {NAME}: {reason}" if reason else NAME


def verify(
  shape: tuple[int, int, int], dtype: str, rate: float, interpret: bool = False
) -> list[str]:
  """Compares the kernels on this device with plain XLA in float32.

  Args:
    shape: the shape [B, L, D] of the residual stream.
    dtype: the dtype of the stream and the branch.
    rate: the dropout rate; 0 for no dropout.
    interpret: whether Pallas interprets the kernels, on any platform.

  Returns:
    A phrase for each wrong result, or for the error that a kernel raised.
  """
  arrays, vectors = _draw_inputs(shape, dtype)
  words = None
  if rate:
    words = draw(jax.random.key(1), shape, rate)

  def plainly(x, y, norm):
    return _add_and_normalize_plainly(x, y, words, rate, norm)

  def by_kernels(x, y, norm):
    return add_and_normalize(x, y, words, rate, norm, True, interpret)

  # Both get the same inputs, already rounded to the dtype.
  run = jax.jit(_with_gradients, static_argnums=0)
  exact = arrays.astype(jnp.float32)
  expected = jax.device_get(run(plainly, exact, vectors))
  try:
    found = jax.device_get(run(by_kernels, arrays, vectors))
  except Exception as error:  # whatever a compiler or a device raises
    words_of_error = " ".join(str(error).split())
    return [f"{type(error).__name__}: {words_of_error}"]
  return _compare(found, expected, dtype)


def _draw_inputs(shape, dtype):
  """Returns ([x, y, dh] in the dtype, [scale, bias] in float32)."""
  of_arrays, of_vectors = jax.random.split(jax.random.key(0))
  arrays = jax.random.normal(of_arrays, (3, *shape))
  vectors = jax.random.normal(of_vectors, (2, shape[2]))
  return arrays.astype(dtype), vectors


def _with_gradients(end, arrays, vectors):
  """Returns (h, dx, dy, dscale, dbias) of a function (x, y, norm) -> (a, h)."""
  x, y, dh = arrays

  def run(x, y, scale, bias):
    norm: Any = nnx.LayerNorm(len(scale), epsilon=1e-5, rngs=nnx.Rngs(0))
    norm.scale[...], norm.bias[...] = scale, bias
    return end(x, y, norm)

  (a, h), pullback = jax.vjp(run, x, y, *vectors)
  return h, *pullback((jnp.cos(a), dh))


def _compare(found, expected, dtype):
  """Returns a phrase for each of `verify`'s results that is wrong."""
  faults = []
  tolerance = max(MIN_TOLERANCE, 2 * float(jnp.finfo(dtype).eps))
  names = "h", "dx", "dy", "dscale", "dbias"
  for name, x, y in zip(names, found, expected, strict=True):
    error = abs(x.astype(np.float32) - y).max() / abs(y).max()
    if not error <= tolerance:  # or NaN
      faults.append(f"error of {name} {error:.2g}, above {tolerance:.2g}")
  return faults


def _add_and_normalize_plainly(x_BLD, y_BLD, words_BWD, rate, norm):
  """The reference of `add_and_normalize`, with the same arguments."""
  a_BLD = None
  sum_BLD = x_BLD
  if y_BLD is not None:
    # It is not rounded before it is added.
    a_BLD = drop(y_BLD.astype(jnp.float32), words_BWD, rate)
    sum_BLD = x_BLD + a_BLD
  with jax.named_scope("norm"):
    return a_BLD, norm(sum_BLD).astype(x_BLD.dtype)
