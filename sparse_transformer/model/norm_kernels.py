"""Fused kernels for layer norms on NVIDIA GPUs, in Pallas; see `normalization`.

A row is one position of the residual stream. A program normalizes neighboring
rows of a sequence and keeps their values in registers, so that it reads and
writes each array only once. If the width of a row is not a power of two, masked
loads and stores pad the row to the next power of two.

Shape suffixes: T is the number of rows that a program processes at a time, and
P is the padded width of a row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.sharding import PartitionSpec

from sparse_transformer.model import sharding
from sparse_transformer.model.dropout import WORD, drop, share

# The number of values of each array that a program processes at a time. Each of
# its threads holds 16 of them: the backward pass keeps about eight arrays in
# registers, of which a thread has at most 255.
NUM_VALUES = 2048
THREAD_VALUES = 16
# The number of rows that a program of the backward pass processes in a loop. It
# writes sums over these rows. With more rows, there are fewer sums to read
# again, but too few programs to keep a GPU busy.
NUM_ROWS = 64


class _Rows:
  """T rows of one sequence, whose dropout bits are in one word per feature.

  Args:
    batch: the index of the sequence.
    first: the index of the first row.
    num: T, the number of rows.
    like: a reference to an array [B, L, D].
  """

  def __init__(self, batch, first, num, like):
    _, length, self.width = like.shape
    padded = pl.next_power_of_2(self.width)
    self._batch = batch
    self._first = first
    self._rows_T = first + jnp.arange(num)
    self._columns_P = jnp.arange(padded)

    # Masks are needed only if a program may exceed the array.
    self._is_column_P = None
    if padded > self.width:
      self._is_column_P = self._columns_P < self.width
    self.mask_TP = None
    if length % NUM_ROWS or padded > self.width:
      is_row_T1 = (self._rows_T < length)[:, None]
      is_column_1P = (self._columns_P < self.width)[None]
      self.mask_TP = is_row_T1 & is_column_1P

  def load(self, ref: Any) -> jax.Array:
    """Loads rows [T, P] of an array [B, L, D], as float32; padding is 0."""
    other = None if self.mask_TP is None else 0.0
    x_TP = plgpu.load(self._at(ref), mask=self.mask_TP, other=other)
    return x_TP.astype(jnp.float32)

  def store(self, ref: Any, x_TP: jax.Array) -> None:
    """Writes rows of an array [B, L, D], in its dtype."""
    plgpu.store(self._at(ref), x_TP.astype(ref.dtype), mask=self.mask_TP)

  def load_dropped(self, ref: Any) -> jax.Array:
    """Loads the dropout mask of the rows, bool [T, P]; see `dropout.draw`."""
    # The last program may have rows after the last word.
    word = jnp.minimum(self._first // WORD, ref.shape[1] - 1)
    words_P = self.load_row(ref, self._batch, word)
    bits_T = (self._rows_T % WORD).astype(jnp.uint32)
    return words_P[None] >> bits_T[:, None] & 1 != 0

  def load_row(self, ref: Any, *index: Any) -> jax.Array:
    """Loads one row [P] of an array [..., D]; padding is 0."""
    other = None if self._is_column_P is None else 0
    at = ref.at[(*index, self._columns_P)]
    return plgpu.load(at, mask=self._is_column_P, other=other)

  def store_row(self, ref: Any, x_P: jax.Array, *index: Any) -> None:
    """Writes one row of an array [..., D]."""
    at = ref.at[(*index, self._columns_P)]
    plgpu.store(at, x_P, mask=self._is_column_P)

  def mean(self, x_TP: jax.Array) -> jax.Array:
    """Returns the mean of each row, [T, 1]. Values in the padding must be 0."""
    return jnp.sum(x_TP, axis=1, keepdims=True) / self.width

  def _at(self, ref):
    return ref.at[self._batch, self._rows_T[:, None], self._columns_P[None]]


class Branch(NamedTuple):
  """The end of a residual branch.

  Attributes:
    y_BLD: the output of the branch before dropout, or None without a branch.
    words_BWD: a bit mask of the dropped values of y, as `dropout.draw` returns
      it; None drops no values.
  """

  y_BLD: jax.Array | None
  words_BWD: jax.Array | None


class Settings(NamedTuple):
  """The constants of a compiled kernel.

  Attributes:
    epsilon: a small number that is added to variances.
    rate: the dropout rate. The share of values that kernels drop is
      `dropout.share(rate)`.
    interpret: whether Pallas interprets the kernels, on any platform.
  """

  epsilon: float
  rate: float
  interpret: bool


def _normalize(rows, x_ref, branch, settings):
  """Adds a branch to rows of the stream, and normalizes the sum.

  Args:
    rows: `_Rows`.
    x_ref: a reference to the stream.
    branch: a `Branch` of references.
    settings: a `Settings`.

  Returns (normalized [T, P], 1 / deviation [T, 1], dropped [T, P] or None).
  """
  sum_TP = rows.load(x_ref)
  dropped_TP = None
  if branch.words_BWD is not None:
    dropped_TP = rows.load_dropped(branch.words_BWD)
  if branch.y_BLD is not None:
    y_TP = rows.load(branch.y_BLD)
    sum_TP += _drop(y_TP, dropped_TP, settings)

  centered_TP = sum_TP - rows.mean(sum_TP)
  if rows.mask_TP is not None:
    centered_TP = jnp.where(rows.mask_TP, centered_TP, 0.0)
  variance_T1 = rows.mean(centered_TP * centered_TP)
  scale_T1 = lax.rsqrt(variance_T1 + settings.epsilon)
  return centered_TP * scale_T1, scale_T1, dropped_TP


def _drop(x_TP, dropped_TP, settings):
  """Applies dropout, and scales the values that remain."""
  if dropped_TP is None:
    return x_TP
  return jnp.where(dropped_TP, 0.0, x_TP / float(1 - share(settings.rate)))


def forward(
  arrays: tuple[jax.Array, Branch],
  vectors: tuple[jax.Array, jax.Array],
  settings: Settings,
) -> jax.Array:
  """Adds a branch to the stream, and normalizes the sum.

  Args:
    arrays: (x_BLD, branch).
    vectors: (scale_D, bias_D) in float32.
    settings: a `Settings`.

  Returns h_BLD in the dtype of x.
  """
  x_BLD, _ = arrays
  num, _ = _program_size(x_BLD.shape[2])

  def kernel(arrays, vectors, h_ref):
    x_ref, branch = arrays
    rows = _Rows(pl.program_id(1), pl.program_id(0) * num, num, x_ref)
    scale_P, bias_P = (rows.load_row(ref) for ref in vectors)
    normalized_TP, *_ = _normalize(rows, x_ref, branch, settings)
    rows.store(h_ref, normalized_TP * scale_P[None] + bias_P[None])

  call = _call(kernel, "norm_forward", x_BLD, num, [x_BLD], settings)
  (h_BLD,) = call(arrays, vectors)
  return h_BLD


def backward(
  arrays: tuple[jax.Array, Branch, jax.Array, jax.Array | None],
  vectors: tuple[jax.Array],
  settings: Settings,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
  """Computes the gradients of `forward` and of dropout.

  Args:
    arrays: (x_BLD, branch, dh_BLD, da_BLD). da_BLD is the gradient with respect
      to the branch after dropout, in float32, or None without a branch.
    vectors: (scale_D,) in float32.
    settings: a `Settings`.

  Returns:
    (dscale_BSD, dbias_BSD, dx_BLD, dy_BLD). The first two are partial sums in
    float32: S is the number of programs per sequence, and each program sums
    over its own rows. dy_BLD is None without a branch.
  """
  x_BLD, branch, *_ = arrays
  batch, length, width = x_BLD.shape
  num, padded = _program_size(width)
  num_programs = pl.cdiv(length, NUM_ROWS)

  def kernel(arrays, vectors, dscale_ref, dbias_ref, dx_ref, *dy_refs):
    x_ref, branch, dh_ref, da_ref = arrays
    (scale_ref,) = vectors
    program, batch = pl.program_id(0), pl.program_id(1)
    first = program * NUM_ROWS

    def add_rows(i, sums):
      dscale_TP, dbias_TP = sums
      rows = _Rows(batch, first + i * num, num, x_ref)
      scale_P = rows.load_row(scale_ref)
      normalized_TP, scale_T1, dropped_TP = _normalize(
        rows, x_ref, branch, settings
      )
      dh_TP = rows.load(dh_ref)

      # Subtract the components along a change of the mean and of the variance,
      # because the norm does not depend on them.
      dnormalized_TP = dh_TP * scale_P[None]
      along_T1 = rows.mean(dnormalized_TP * normalized_TP)
      dsum_TP = dnormalized_TP - rows.mean(dnormalized_TP)
      dsum_TP = scale_T1 * (dsum_TP - normalized_TP * along_T1)
      rows.store(dx_ref, dsum_TP)
      for dy_ref in dy_refs:
        dy_TP = _drop(dsum_TP + rows.load(da_ref), dropped_TP, settings)
        rows.store(dy_ref, dy_TP)
      return dscale_TP + dh_TP * normalized_TP, dbias_TP + dh_TP

    zeros_TP = jnp.zeros((num, padded), jnp.float32)
    sums = lax.fori_loop(0, NUM_ROWS // num, add_rows, (zeros_TP, zeros_TP))

    rows = _Rows(batch, first, num, x_ref)
    for ref, sum_TP in zip((dscale_ref, dbias_ref), sums, strict=True):
      rows.store_row(ref, sum_TP.sum(0), batch, program)

  sums_BSD = jax.ShapeDtypeStruct((batch, num_programs, width), jnp.float32)
  outs = [sums_BSD, sums_BSD, x_BLD]
  if branch.y_BLD is not None:
    outs.append(branch.y_BLD)
  call = _call(kernel, "norm_backward", x_BLD, NUM_ROWS, outs, settings)
  dscale_BSD, dbias_BSD, dx_BLD, *dy_BLD = call(arrays, vectors)
  return dscale_BSD, dbias_BSD, dx_BLD, dy_BLD[0] if dy_BLD else None


def _program_size(width):
  """Returns (T, P): rows that a program processes at a time; padded width."""
  padded = pl.next_power_of_2(width)
  num = max(1, min(NUM_VALUES // padded, WORD))
  return num, padded


def _call(kernel, name, x_BLD, num_rows, outs, settings):
  """Returns a function that runs a kernel on all rows.

  Args:
    kernel: the kernel.
    name: its name in profiles and compiled programs.
    x_BLD: the stream, or its shape.
    num_rows: the number of rows of each program.
    outs: arrays with the shapes and dtypes of the results.
    settings: a `Settings`.
  """
  batch, length, width = x_BLD.shape
  num, padded = _program_size(width)
  num_threads = num * padded // THREAD_VALUES
  return pl.pallas_call(
    kernel,
    grid=(pl.cdiv(length, num_rows), batch),
    out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in outs],
    compiler_params=plgpu.CompilerParams(num_warps=max(1, num_threads // 32)),
    interpret=settings.interpret,
    name=name,
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def run(
  settings: Settings,
  x_BLD: jax.Array,
  branch: Branch,
  scale_D: jax.Array,
  bias_D: jax.Array,
) -> tuple[jax.Array | None, jax.Array]:
  """Implements `normalization.add_and_normalize` with kernels, on any mesh.

  XLA, not a kernel, computes the branch after dropout, because XLA fuses this
  dropout with the next addition to the stream. The backward kernel computes the
  gradients of both dropout and the norm.
  """
  a_BLD = None
  if branch.y_BLD is not None:
    y_BLD = branch.y_BLD.astype(jnp.float32)
    a_BLD = drop(y_BLD, branch.words_BWD, settings.rate)
  with jax.named_scope("norm"):
    h_BLD = _on_devices(
      functools.partial(forward, settings=settings),
      (x_BLD, branch),
      (scale_D, bias_D),
    )
  return a_BLD, h_BLD


def _save(settings, x_BLD, branch, scale_D, bias_D):
  results = run(settings, x_BLD, branch, scale_D, bias_D)
  return results, (x_BLD, branch, scale_D)


def _pull_back(settings, saved, gradients):
  x_BLD, branch, scale_D = saved
  da_BLD, dh_BLD = gradients
  with jax.named_scope("norm"):
    dscale_BSD, dbias_BSD, dx_BLD, dy_BLD = _on_devices(
      functools.partial(backward, settings=settings),
      (x_BLD, branch, dh_BLD, da_BLD),
      (scale_D,),
    )
    dscale_D = dscale_BSD.sum((0, 1))
    dbias_D = dbias_BSD.sum((0, 1))

  # Words have no gradient.
  dbranch = Branch(dy_BLD, None)
  return dx_BLD, dbranch, dscale_D, dbias_D


run.defvjp(_save, _pull_back)


def _on_devices(
  kernel: Callable, arrays: tuple[Any, ...], vectors: tuple[jax.Array, ...]
) -> Any:
  """Runs a kernel on each device, because XLA cannot split it over a mesh.

  Args:
    kernel: a function (arrays, vectors) -> results. The first two axes of each
      array and result are sequences and positions, or blocks of positions.
    arrays: arrays that are sharded over the mesh like the residual stream. The
      first is x_BLD.
    vectors: arrays that are replicated on all devices.
  """
  if sharding.size(sharding.AXES) == 1:
    return kernel(arrays, vectors)

  spec = sharding.positions(*arrays[0].shape[:2])
  return jax.shard_map(
    kernel,
    in_specs=(spec, PartitionSpec()),
    out_specs=spec,
    check_vma=False,  # interpreted kernels do not declare how results vary
  )(arrays, vectors)
