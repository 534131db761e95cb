"""Every executor computes what the definition of a pattern says."""

import dataclasses
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import pytest
from helpers import catalogue, executor_laws as laws
from hypothesis import strategies as st

from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import xla
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Dilated,
  Local,
  Strided,
  Summary,
  TopBlocks,
)

heavy = lambda *case: pytest.param(*case, marks=pytest.mark.soak)
EXECUTORS = laws.ANYWHERE
# The two in plain XLA differ in the sizes of steps only.
EACH = "streamed", heavy("batched")
BACKENDS = "dense", *EACH

SIXES = [catalogue.ALL[i : i + 6] for i in range(0, len(catalogue.ALL), 6)]


def every_pattern():
  """Heads with a backend and options, which take turns; soak runs the rest."""
  names = itertools.product(SIXES, ("dense", *EXECUTORS), laws.OPTIONS)
  for heads, name, options in names:
    turn = SIXES.index(heads)
    now = turn % len(laws.OPTIONS) == laws.OPTIONS.index(options)
    case = (*heads, *SIXES[0])[:6], name, options
    is_other = name == EXECUTORS[turn % 2]
    yield case if now and not is_other else heavy(*case)


# Patterns run as the heads of one call, so that fewer programs are compiled.
@pytest.mark.parametrize("heads, backend, options", [*every_pattern()])
@pytest.mark.one_in(3)
def test_every_pattern_agrees_with_its_definition(heads, backend, options):
  laws.agrees_with_the_reference(backend, heads, 53, 16, options=options)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", SIXES, ids=lambda heads: str(heads[0]))
@pytest.mark.usefixtures("optimized")
def test_every_pattern_agrees_in_optimized_programs(heads, backend):
  laws.agrees_with_the_reference(backend, heads, 67, 16)


@pytest.mark.parametrize(
  "n, tile, backend",
  [
    (1, 16, "streamed"),
    (131, 0, "batched"),
    *(
      heavy(*x, backend)
      for x in ((2, 0), (15, 16), (16, 16), (17, 16), (131, 0), (160, 8))
      for backend in EXECUTORS
    ),
  ],
)
def test_lengths_around_tiles(n, tile, backend):
  heads = [Local(5) | Strided(5), catalogue.Fifths()]
  if n == 160:  # 20 query tiles with 1 to 20 key tiles each
    heads = [Causal(), Dilated(9, 7)]
  laws.agrees_with_the_reference(backend, heads, n, tile)


@pytest.mark.soak
@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(
  st.sampled_from(EXECUTORS),
  st.lists(st.sampled_from(catalogue.ALL), min_size=1, max_size=4),
  st.sampled_from([1, 7, 40, 89, 120]),
  st.sampled_from([0, 8, 16, 32]),
  st.sampled_from(laws.OPTIONS),
)
def test_any_mix_of_heads(backend, mix, n, tile, options):
  if len(mix) % options.group:
    options = dataclasses.replace(options, group=len(mix))
  laws.agrees_with_the_reference(backend, mix, n, tile, options=options)


# Weights, outputs, gradients of scores and results are each rounded once, to 8
# or to 11 bits of mantissa.
@pytest.mark.parametrize(
  "dtype, tolerance",
  [heavy(jnp.float32, 2e-5), (jnp.bfloat16, 0.02), heavy(jnp.float16, 0.0025)],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("optimized")
def test_each_dtype_stays_close_in_optimized_programs(
  backend, dtype, tolerance
):
  heads = Local(12) | Strided(12), catalogue.Fifths()
  laws.agrees_with_the_reference(backend, heads, 48, 16, dtype, tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, heavy(jnp.float16)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_of_0_averages_values_in_16_bits(backend, dtype):
  heads, options = (Local(3), Strided(5)), laws.Options(scale=0.0)
  settings = dict(dtype=dtype, tolerance=0.02, options=options)
  laws.agrees_with_the_reference(backend, heads, 24, 8, **settings)


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_computed_in_float64(backend):
  with jax.enable_x64(True):
    laws.agrees_with_the_reference(
      backend, [Strided(5)], 24, 8, jnp.float64, 1e-13
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_without_keys_gives_zero(backend):
  laws.row_without_keys_gives_zero(backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pattern_without_pairs_gives_zeros(backend):
  laws.pattern_without_pairs_gives_zeros(backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
  "heads",
  [heads if i == 0 else heavy(heads) for i, heads in enumerate(SIXES)],
  ids=len,
)
def test_gradient_is_exactly_zero_outside_the_pattern(heads, backend):
  laws.gradient_is_zero_outside_the_pattern(backend, heads)


@pytest.mark.parametrize("backend", EXECUTORS)
def test_tables_of_a_plan_can_be_arguments_of_jit(backend):
  laws.tables_can_be_arguments_of_jit(backend)


@pytest.mark.parametrize("backend", EXECUTORS)
def test_tables_of_a_plan_can_be_indexed_by_a_traced_number(backend):
  laws.tables_can_be_indexed_by_a_traced_number(backend)


@pytest.mark.parametrize("backend", EACH)
@pytest.mark.parametrize(
  "pattern", [Local(4) | Strided(4), *map(heavy, (Causal(), TopBlocks(2, 4)))]
)
def test_all_derivatives_are_right(backend, pattern):
  assert laws.derivatives_are_right_or_raise(backend, pattern) == 6


class Short(xla.Xla):
  """Runs at most 300 positions, in tiles of 8."""

  def unsupported(self, case):
    return "at most 300 positions" if case.length > 300 else None


def test_auto_tries_registered_executors_and_a_named_one_says_why(request):
  registry.register("short", Short(tiles=(8,)), platforms=("cpu",))
  request.addfinalizer(lambda: registry.unregister("short"))
  for n, name in (300, "short"), (301, "streamed"):
    case = Case(1, n, 1, 8, 12, "float32", "cpu")
    assert registry.resolve("auto", case) == name
  with pytest.raises(NotImplementedError, match="short.*at most 300"):
    registry.resolve("short", case)


def test_batched_executor_lowers_for_accelerators():
  heads = Local(96) | Strided(96), Block(128) | Summary(128, 32), BigBird(64)

  def step(q, k, v, dout):
    attention = functools.partial(attend, patterns=heads, backend="batched")
    return jax.vjp(attention, q, k, v)[1](dout)

  x = jax.ShapeDtypeStruct((1, 3072, 3, 64), jnp.bfloat16)
  traced = jax.jit(step).trace(x, x, x, x)
  for x in ("cuda", "tpu", "rocm"):
    assert "dot_general" in traced.lower(lowering_platforms=(x,)).as_text()


@pytest.mark.parametrize(
  "pattern, tile",
  [(Local(128), 64), (Block(128), 128), (Strided(128), 96)],  # columns of 96
)
def test_tile_is_chosen_from_the_pattern(pattern, tile):
  case = Case(1, 12_288, 1, 64, 64, "float32")
  ((plan, _),) = xla.ON_CPUS.plans((pattern,), case)
  assert plan.tile == tile and plan.tables.single


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
  case = Case(16, 12_288, 8, 64, 64, "bfloat16")
  plans = xla.ON_ACCELERATORS.plans((pattern,) * 8, case)
  tables = [plan.tables.cols for plan, _ in plans]
  assert sum(map(len, tables)) == num_steps
  for cols in tables:
    assert cols[0].size <= xla.MAX_TILES
    assert (cols >= 0).mean() > 0.8  # the rest is padding


LIMITS = {  # MiB
  Block(128) | Summary(128, 32): 80,
  Local(128) | Strided(128): 150,
  BigBird(64): 20,
  Dilated(128, 16): 100,
}


@pytest.mark.parametrize(
  "pattern", [p if i == 0 else heavy(p) for i, p in enumerate(LIMITS)], ids=str
)
@pytest.mark.usefixtures("optimized")
def test_memory_of_forward_and_backward_is_linear(pattern):
  def step(q, k, v, dout):
    attention = functools.partial(attend, patterns=pattern, backend="streamed")
    return jax.vjp(attention, q, k, v)[1](dout)

  x = jax.ShapeDtypeStruct((1, 12288, 4, 64), jnp.float32)
  compiled = jax.jit(step).lower(x, x, x, x).compile()
  assert (
    compiled.memory_analysis().temp_size_in_bytes <= LIMITS[pattern] * 2**20
  )
