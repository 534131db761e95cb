"""Laws of backends: each computes what the definition of a pattern says.

They hold for every registered backend that runs on every platform, for the
dense one, and for the kernels, which run in Pallas' interpreter: it fills
memory that a kernel has not written with NaN.
"""

import dataclasses
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, catalogue
from helpers.cases import listed, soak
from hypothesis import strategies as st

from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.backends import xla
from sparse_transformer.attention.backends.mosaic import Mosaic
from sparse_transformer.attention.backends.triton import Triton
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Dilated,
  Local,
  Pattern,
  Strided,
  Summary,
  TopBlocks,
)

KERNELS = {
  "interpreted_triton": Triton(interpret=True),
  "interpreted_mosaic": Mosaic(interpret=True),
}
GPU, TPU = KERNELS
PLAIN = laws.ANYWHERE
EVERY = "dense", *PLAIN, *KERNELS
# The two in plain XLA differ in the sizes of steps only; the interpreter for
# TPUs is slow.
each_plain_or_dense = pytest.mark.parametrize(
  "backend", ["dense", "streamed", soak("batched")]
)
each_kernel = pytest.mark.parametrize("backend", [GPU, soak(TPU)])


@pytest.fixture(scope="module", autouse=True)
def _interpreted():
  for name, backend in KERNELS.items():
    registry.register(name, backend)
  yield
  for name in KERNELS:
    registry.unregister(name)


def agrees(
  backend,
  heads,
  n,
  *,
  tile=None,
  widths=None,
  batch=2,
  dtype=jnp.float32,
  tolerance=None,
  options=laws.PLAIN,
):
  """Compares results and gradients with those of the definition."""
  if tile is None:
    tile = 32 if backend in KERNELS else 16
  if tolerance is None:
    tolerance = 2e-5 if dtype == jnp.float32 else 0.02
  # Kernels of GPUs need powers of 2.
  k, e = widths or ((16, 32) if backend == GPU else (8, 12))
  inputs = laws.random_inputs(
    n,
    len(heads),
    k=k,
    e=e,
    batch=batch,
    dtype=dtype,
    group=options.group,
  )
  found = laws.run(
    *inputs,
    heads=tuple(heads),
    backend=backend,
    tile=tile,
    options=options,
    unoptimized=jax.config.read("jax_disable_most_optimizations"),
  )

  assert found[0].dtype == dtype
  assert found[1].dtype == jnp.promote_types(dtype, jnp.float32)
  laws.assert_close(found, laws.reference(*inputs, heads, options), tolerance)


# Patterns.

# Patterns run as the heads of one call, so that fewer programs are compiled.
SIXES = [
  (*catalogue.ALL[i : i + 6], *catalogue.ALL)[:6]
  for i in range(0, len(catalogue.ALL), 6)
]
# A pattern is tables to kernels, which take all of them in one launch.
ALL = (*catalogue.ALL, *laws.WITHOUT_KEYS)
# Six heads with one to three parts.
MIXED = (
  Local(12),
  Local(12) | Strided(12),
  Causal() - Causal(),
  Strided(5),
  Local(12),
  Local(12) | Strided(12),
)
LENGTH = 70
GIVEN = catalogue.given(LENGTH)
OPTIONS = laws.OPTIONS


@pytest.mark.parametrize(
  "backend, heads, options",
  listed(
    default=[
      ("dense", SIXES[0], OPTIONS[0]),
      ("streamed", SIXES[2], OPTIONS[2]),
      ("batched", SIXES[3], OPTIONS[3]),
      ("dense", GIVEN, OPTIONS[1]),
      ("streamed", GIVEN, OPTIONS[3]),
      (GPU, ALL, OPTIONS[0]),
      (GPU, MIXED, OPTIONS[2]),
      (GPU, MIXED, OPTIONS[3]),
      (GPU, GIVEN, OPTIONS[0]),
    ],
    every=[
      *itertools.product(("dense", *PLAIN), (*SIXES, GIVEN), OPTIONS),
      *itertools.product(KERNELS, (MIXED, GIVEN), OPTIONS),
      (TPU, ALL, OPTIONS[0]),
    ],
  ),
)
def test_results_and_gradients_are_those_of_the_definition(
  backend, heads, options
):
  batch = 1 if heads == ALL else 2
  agrees(backend, heads, LENGTH, batch=batch, options=options)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["dense", *PLAIN])
@pytest.mark.parametrize("heads", SIXES, ids=lambda heads: str(heads[0]))
@pytest.mark.usefixtures("optimized")
def test_every_pattern_agrees_in_optimized_programs(heads, backend):
  agrees(backend, heads, 67)


AROUND = Local(5) | Strided(5), catalogue.Fifths()
LONG = Causal(), Dilated(9, 7)  # 20 query tiles with 1 to 20 key tiles each


@pytest.mark.parametrize(
  "backend, heads, n, tile",
  listed(
    default=[
      ("streamed", AROUND, 1, 16),
      ("batched", AROUND, 131, 0),
      (GPU, laws.TWO_SLOTS, 1, 32),
      (TPU, laws.SHARED_ORDER, 65, 32),
    ],
    every=[
      *itertools.product(PLAIN, [AROUND], (15, 16, 17), [16]),
      *itertools.product(PLAIN, [AROUND], (2, 131), [0]),
      *itertools.product(PLAIN, [LONG], [160], [8]),
      *itertools.product(
        KERNELS,
        (laws.TWO_SLOTS, laws.SHARED_ORDER, laws.WITHOUT_KEYS),
        (1, 31, 32, 33, 65),
        [32],
      ),
    ],
  ),
)
def test_lengths_around_tiles(backend, heads, n, tile):
  agrees(backend, heads, n, tile=tile)


@each_kernel
@pytest.mark.parametrize(
  "widths", [(128, 128), *map(soak, [(64, 64), (32, 128)])]
)
def test_tile_that_runs_on_the_device(backend, widths):
  n = 150 if backend == GPU else 300
  agrees(backend, laws.TWO_SLOTS, n, widths=widths, tile=0)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(3))  # a test may not map too much memory
@pytest.mark.parametrize("backend", EVERY[1:])
@hypothesis.settings(deadline=None, max_examples=20)
@hypothesis.given(
  heads=st.lists(st.sampled_from(catalogue.ALL), min_size=1, max_size=4),
  n=st.sampled_from([1, 7, 40, 64, 89, 120]),
  tile=st.sampled_from([0, 8, 16, 32, 64]),
  widths=st.sampled_from([(16, 16), (16, 64), (64, 32)]),
  options=st.sampled_from(OPTIONS),
)
def test_any_mix_of_heads(backend, part, heads, n, tile, widths, options):
  del part
  if len(heads) % options.group:
    options = dataclasses.replace(options, group=len(heads))
  if backend in KERNELS:  # in float32, Triton's run tiles of 32 only
    tile = 32 if backend == GPU else max(32, tile)
  agrees(backend, heads, n, tile=tile, widths=widths, options=options)


# Rows and pairs that are not there.


@each_plain_or_dense
def test_row_without_keys_gives_zero(backend):
  n = 40
  pattern = catalogue.Fifths()
  empty = ~pattern.matrix(n).any(1)
  q, k, v, dout, _ = laws.random_inputs(n, 2)
  attention = functools.partial(
    attend,
    patterns=pattern,
    backend=backend,
    tile=16,
    return_lse=True,
  )
  (out, lse), pullback = jax.vjp(jax.jit(attention), q, k, v)
  gradients = pullback((dout, jnp.ones_like(lse)))

  assert empty.any()
  assert not empty.all()
  assert (np.asarray(out)[:, empty] == 0).all()
  assert (np.asarray(lse)[:, empty] == -np.inf).all()
  assert all(np.isfinite(x).all() for x in gradients)
  assert (np.asarray(gradients[0])[:, empty] == 0).all()


@each_plain_or_dense
def test_pattern_without_pairs_gives_zeros(backend):
  inputs = laws.random_inputs(40, 1)
  nothing = (Causal() - Causal(),)
  results = laws.run(
    *inputs,
    heads=nothing,
    backend=backend,
    tile=16,
  )

  assert all((np.asarray(x) == 0).all() for x in results)


@each_plain_or_dense
@pytest.mark.parametrize("heads", [SIXES[0], *map(soak, SIXES[1:])], ids=len)
def test_gradient_is_exactly_zero_outside_the_pattern(heads, backend):
  n = 35
  q, k, v, *_ = laws.random_inputs(
    n,
    len(heads),
    k=2,
    e=2,
    batch=1,
  )

  def summed(q, k, v):
    # Summed over heads, which do not interact: one column of the Jacobian.
    return attend(q, k, v, heads, backend=backend, tile=16).sum(2)

  jacobians = jax.jit(jax.jacrev(summed, argnums=(0, 1, 2)))(q, k, v)

  # [output position, input position, head]: the largest of all widths.
  dq, dk, dv = (np.abs(x).max((0, 2, 3, 6)) for x in jacobians)
  for head, pattern in enumerate(heads):
    matrix = pattern.matrix(n)
    assert (dv[~matrix, head] == 0).all()
    assert (dk[~matrix, head] == 0).all()
    assert (dq[~np.eye(n, dtype=bool), head] == 0).all()
    assert (dv[matrix, head] > 0).all()


# Numbers.


# Weights, outputs, gradients of scores and results are each rounded once, to 8
# or to 11 bits of mantissa.
@each_plain_or_dense
@pytest.mark.parametrize(
  "dtype, tolerance",
  [
    (jnp.bfloat16, 0.02),
    soak(jnp.float16, 0.0025),
    soak(jnp.float32, 2e-5),
  ],
)
@pytest.mark.usefixtures("optimized")
def test_each_dtype_stays_close_in_optimized_programs(
  backend, dtype, tolerance
):
  heads = Local(12) | Strided(12), catalogue.Fifths()
  agrees(backend, heads, 48, dtype=dtype, tolerance=tolerance)


@pytest.mark.parametrize(
  "backend, dtype",
  [
    (GPU, jnp.bfloat16),
    soak(GPU, jnp.float16),
    soak(TPU, jnp.bfloat16),
  ],
)
def test_narrow_dtypes_of_kernels(backend, dtype):
  agrees(backend, laws.TWO_SLOTS, LENGTH, dtype=dtype)


@each_plain_or_dense
def test_float64_is_computed_in_float64(backend):
  with jax.enable_x64(True):
    agrees(backend, [Strided(5)], 24, dtype=jnp.float64, tolerance=1e-13)


SCALES = (
  (-0.7, 0.0),
  (-0.7, 2.0),
  (0.0, 0.0),
)


@pytest.mark.parametrize(
  "backend, dtype, scale, softcap",
  listed(
    default=[
      ("dense", jnp.bfloat16, 0.0, 0.0),
      ("streamed", jnp.float16, 0.0, 0.0),
      (GPU, jnp.float32, -0.7, 2.0),
    ],
    every=[
      (backend, dtype, *scales)
      for backend in EVERY
      for dtype in (jnp.float32, jnp.bfloat16)
      for scales in SCALES
    ],
  ),
)
def test_scales_that_are_not_above_0(backend, dtype, scale, softcap):
  """A scale of 0 averages values."""
  options = laws.Options(scale=scale, softcap=softcap)
  agrees(backend, MIXED, LENGTH, batch=1, dtype=dtype, options=options)


# Tables.


@pytest.mark.parametrize(
  "backend, heads",
  [
    *((backend, (Local(9) | Strided(7),) * 3) for backend in PLAIN),
    (GPU, (*laws.TWO_SLOTS, Causal())),
    (TPU, (Local(17), Local(17))),
  ],
)
def test_tables_of_plans_can_be_arguments_of_jit(backend, heads, monkeypatch):
  monkeypatch.setattr(Mosaic, "MOST_STEPS", 4)  # several launches
  n = 96
  tile = 32 if backend in KERNELS else 16
  inputs = laws.random_inputs(
    n,
    len(heads),
    k=16,
    e=16,
    batch=1,
  )
  plans, heads_of = zip(*laws.plans_of(backend, heads, n, tile), strict=True)
  if backend in KERNELS:
    lists = plans[0].tables.by_query  # slots, or grids
    assert len(getattr(lists, "written", lists)) > 1

  @jax.jit
  def planned(plans, *inputs):
    for table in jax.tree.leaves(plans):
      assert isinstance(table, jax.core.Tracer)
    pairs = zip(plans, heads_of, strict=True)
    return laws.run_plans(backend, pairs, *inputs)

  laws.assert_close(planned(plans, *inputs), laws.reference(*inputs, heads))


@dataclasses.dataclass(frozen=True)
class Queries(Pattern):
  """All pairs whose query is in [first, last)."""

  first: int
  last: int

  def mask(self, q, k):
    return (q >= self.first) & (q < self.last) & (k >= 0)


@pytest.mark.parametrize("backend", PLAIN)
def test_tables_of_a_plan_can_be_indexed_by_a_traced_number(backend):
  """As where two devices have half of the queries each."""
  n = 64
  everywhere = Strided(3, causal=False)
  halves = [Queries(i, i + n // 2) & everywhere for i in (0, n // 2)]
  plans = []
  for half in halves:
    ((plan, _),) = laws.plans_of(backend, (half,) * 2, n, 8)
    # The tables say which queries; the mask may then be the same for both.
    plans.append(dataclasses.replace(plan, pattern=everywhere))

  stacked = jax.tree.map(lambda *tables: np.stack(tables), *plans)

  @jax.jit
  def indexed(i, *inputs):
    plan = jax.tree.map(lambda table: jnp.asarray(table)[i], stacked)
    return laws.run_plans(backend, [(plan, None)], *inputs)

  inputs = laws.random_inputs(n, 2)
  for i, half in enumerate(halves):
    expected = laws.reference(*inputs, (half,) * 2)
    laws.assert_close(indexed(i, *inputs), expected)


# Transformations.


def values_or_none(functions, x):
  """Values, from one program if no function raises; None for those that do."""
  try:
    return jax.jit(lambda x: [f(x) for f in functions])(x)
  except (NotImplementedError, TypeError, ValueError, AssertionError):
    if len(functions) == 1:
      return [None]
  return [y for f in functions for y in values_or_none([f], x)]


@pytest.mark.parametrize(
  "backend, pattern, least",
  [
    ("streamed", Local(4) | Strided(4), 6),
    soak("streamed", Causal(), 6),
    soak("streamed", TopBlocks(2, 4), 6),
    soak("batched", Local(4) | Strided(4), 6),
    soak("batched", Causal(), 6),
    soak("batched", TopBlocks(2, 4), 6),
    (GPU, Local(4) | Strided(4), 2),
    soak(TPU, Local(4) | Strided(4), 2),
  ],
)
def test_derivatives_are_right_or_raise(backend, pattern, least):
  """Gradients, second derivatives both ways, and `vmap` of them."""
  q, k, v, *_ = laws.random_inputs(
    20,
    1,
    k=16,
    e=16,
    batch=1,
  )

  def loss(scale, backend=backend):
    return (attend(scale * q, k, v, pattern, backend=backend) ** 2).sum()

  gradient = jax.grad(loss)
  plain = jax.grad(lambda x: loss(x, "dense"))
  scale = jnp.float32(0.7)
  first, second = values_or_none((plain, jax.jacfwd(plain)), scale)
  derivatives = {
    gradient: first,
    jax.jacrev(gradient): second,
    jax.jacfwd(gradient): second,
    lambda scale: jax.jvp(gradient, (scale,), (1.0,))[1]: second,
    lambda scale: jax.vmap(gradient)(scale[None])[0]: first,
    lambda scale: jax.vmap(jax.hessian(loss))(scale[None])[0]: second,
  }
  count = 0
  found = values_or_none(derivatives, scale)
  for value, expected in zip(found, derivatives.values(), strict=True):
    if value is not None:
      np.testing.assert_allclose(value, expected, rtol=2e-3)
      count += 1

  assert count >= least


@each_kernel
def test_attention_can_be_mapped(backend):
  q, k, v, *_ = laws.random_inputs(
    40,
    2,
    k=16,
    e=32,
    batch=4,
  )
  pairs = [x.reshape(2, 2, *x.shape[1:]) for x in (q, k, v)]

  @jax.jit
  def attention(*arrays):
    return attend(
      *arrays,
      laws.TWO_SLOTS,
      backend=backend,
      tile=32,
    )

  mapped = jax.vmap(attention)(*pairs)

  np.testing.assert_array_equal(mapped.reshape(v.shape), attention(q, k, v))


# What is registered, and what plain backends plan.


class Short(xla.Xla):
  """Runs at most 300 positions, in tiles of 8."""

  def unsupported(self, request):
    return "at most 300 positions" if request.length > 300 else None


def test_auto_tries_registered_backends_and_a_named_one_says_why(request):
  registry.register("short", Short(tiles=(8,)), platforms=("cpu",))
  request.addfinalizer(lambda: registry.unregister("short"))
  short = laws.request_for((Local(9),), 300, platform="cpu")
  long = laws.request_for((Local(9),), 301, platform="cpu")

  assert registry.resolve("auto", short) == "short"
  assert registry.resolve("auto", long) == "streamed"
  with pytest.raises(NotImplementedError, match="short.*at most 300"):
    registry.resolve("short", long)


def step_of(patterns, backend):
  """The gradients of attention by a cotangent."""
  attention = functools.partial(
    attend,
    patterns=patterns,
    backend=backend,
  )
  return jax.jit(lambda q, k, v, dout: jax.vjp(attention, q, k, v)[1](dout))


def test_batched_backend_lowers_for_accelerators():
  heads = Local(96) | Strided(96), Block(128) | Summary(128, 32), BigBird(64)
  x = jax.ShapeDtypeStruct((1, 3072, 3, 64), jnp.bfloat16)
  traced = step_of(heads, "batched").trace(x, x, x, x)
  for platform in ("cuda", "tpu", "rocm"):
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "dot_general" in text


@pytest.mark.parametrize(
  "pattern, tile",
  [
    (Local(128), 64),
    (Block(128), 128),
    (Strided(128), 96),  # columns of 96
  ],
)
def test_tile_is_chosen_from_the_pattern(pattern, tile):
  ((plan, _),) = xla.ON_CPUS.plans(laws.request_for((pattern,), 12_288))
  assert plan.tile == tile
  assert plan.tables.single


@pytest.mark.parametrize(
  "pattern, num_steps",
  [
    (Block(128) | Summary(128, 32), 45),
    (Local(128) | Strided(128), 12),
    (BigBird(64), 35),
    (Causal(), 156),
  ],
  ids=str,
)
def test_steps_on_accelerators_are_few_and_bounded(pattern, num_steps):
  request = laws.request_for((pattern,) * 8, 12_288, batch=16)
  plans = xla.ON_ACCELERATORS.plans(request)
  steps = [plan.tables.cols for plan, _ in plans]

  assert sum(map(len, steps)) == num_steps
  for cols in steps:
    assert cols[0].size <= xla.MAX_TILES
    assert (cols >= 0).mean() > 0.8  # the rest is padding


@pytest.mark.parametrize(
  "pattern, mebibytes",
  [
    (Block(128) | Summary(128, 32), 80),
    soak(Local(128) | Strided(128), 150),
    soak(BigBird(64), 20),
    soak(Dilated(128, 16), 100),
  ],
  ids=str,
)
@pytest.mark.usefixtures("optimized")
def test_memory_of_forward_and_backward_is_linear(pattern, mebibytes):
  x = jax.ShapeDtypeStruct((1, 12288, 4, 64), jnp.float32)
  compiled = step_of(pattern, "streamed").lower(x, x, x, x).compile()
  analysis = compiled.memory_analysis()
  assert analysis.temp_size_in_bytes <= mebibytes * 2**20
