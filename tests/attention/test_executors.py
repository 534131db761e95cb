"""Every executor computes what the definition of a pattern says."""

import dataclasses
import functools
import itertools

import catalogue
import executor_laws as laws
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.contract import Plan
from sparse_transformer.attention.executors import streamed
from sparse_transformer.attention.heads import heads_of_parts
from sparse_transformer.attention.orders import orders_of
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

EXECUTORS = laws.ANYWHERE
BACKENDS = "dense", *EXECUTORS
SETTINGS = dict(stride=12, window=12, width=3, num_summaries=2)


def heavy(*case):
  return pytest.param(*case, marks=pytest.mark.soak)


SIXES = [catalogue.ALL[i : i + 6] for i in range(0, len(catalogue.ALL), 6)]


def every_pattern():
  """Heads with a backend and options, which take turns; soak runs the rest."""
  names = itertools.product(SIXES, BACKENDS, laws.OPTIONS)
  for heads, name, options in names:
    # Programs of "streamed" grow with each pattern.
    turn = SIXES.index(heads) + BACKENDS.index(name) * (name == "streamed")
    now = turn % len(laws.OPTIONS) == laws.OPTIONS.index(options)
    case = (*heads, *SIXES[0])[:6], name, options
    yield case if now and (name != "streamed" or turn < 4) else heavy(*case)


# Patterns run as the heads of one call, so that fewer programs are compiled.
@pytest.mark.parametrize("heads, backend, options", [*every_pattern()])
def test_every_pattern_agrees_with_its_definition(heads, backend, options):
  laws.agrees_with_the_reference(backend, heads, 53, 16, options=options)


@pytest.mark.soak
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", SIXES, ids=lambda heads: str(heads[0]))
@pytest.mark.usefixtures("optimized")
def test_every_pattern_agrees_in_optimized_programs(heads, backend):
  laws.agrees_with_the_reference(backend, heads, 67, 16)


@pytest.mark.parametrize("backend", EXECUTORS)
@pytest.mark.parametrize(
  "n, tile",
  [
    *((1, 16), (131, 0)),
    *(heavy(*x) for x in ((2, 0), (15, 16), (16, 16), (17, 16), (160, 8))),
  ],
)
def test_lengths_around_tiles(n, tile, backend):
  heads = [Local(5) | Strided(5), catalogue.Fifths()]
  if n == 160:  # 20 query tiles with 1 to 20 key tiles each
    heads = [Causal(), Dilated(9, 7)]
  laws.agrees_with_the_reference(backend, heads, n, tile)


@pytest.mark.parametrize("examples", [3, heavy(100)])
def test_any_mix_of_heads(examples):
  @hypothesis.settings(deadline=None, max_examples=examples)
  @hypothesis.given(
    st.sampled_from(EXECUTORS),
    st.lists(st.sampled_from(catalogue.ALL), min_size=1, max_size=4),
    st.sampled_from([1, 7, 40, 89, 120]),
    st.sampled_from([0, 8, 16, 32]),
    st.sampled_from(laws.OPTIONS),
  )
  def check(backend, mix, n, tile, options):
    if len(mix) % options.group:
      options = dataclasses.replace(options, group=len(mix))
    laws.agrees_with_the_reference(backend, mix, n, tile, options=options)

  check()


# Weights, outputs, gradients of scores and results are each rounded once, to 8
# or to 11 bits of mantissa.
@pytest.mark.parametrize(
  "dtype, tolerance",
  [
    heavy(jnp.float32, 2e-5),
    (jnp.bfloat16, 0.02),
    heavy(jnp.float16, 0.0025),
  ],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.usefixtures("optimized")
def test_each_dtype_stays_close_in_optimized_programs(
  backend, dtype, tolerance
):
  heads = Local(12) | Strided(12), catalogue.Fifths()
  laws.agrees_with_the_reference(backend, heads, 48, 16, dtype, tolerance)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
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


@pytest.mark.parametrize("backend", EXECUTORS)
@pytest.mark.parametrize(
  "pattern",
  [Local(4) | Strided(4), *map(heavy, (Causal(), TopBlocks(2, 4)))],
)
def test_all_derivatives_are_right(backend, pattern):
  assert laws.derivatives_are_right_or_raise(backend, pattern) == 6


class Untiled:
  """A toy executor: all scores of a part at once, with its mask as a table."""

  def unsupported(self, case):
    return "at most 300 positions" if case.length > 300 else None

  def tile_size(self, part, case):
    return case.length

  def plan(self, part, n):
    layout = part.layout(n, n)
    mask = part.matrix(n)[layout.query_order][:, layout.key_order]
    return Plan(part, layout.tile, mask, *orders_of(layout))

  def plans(self, patterns, case):
    n, parts = case.length, heads_of_parts(patterns, case.length)
    return [(self.plan(part, n), heads) for part, heads in parts]

  def _weights(self, plan, q, k, lse=None):
    wide = jnp.promote_types(q.dtype, jnp.float32)
    s = jnp.einsum("blhk,bmhk->bhlm", q.astype(wide), k.astype(wide))
    s = jnp.where(plan.tables[None, None], s / np.sqrt(q.shape[-1]), -jnp.inf)
    if lse is None:
      lse = jax.nn.logsumexp(s, -1)
    else:
      lse = lse.swapaxes(1, 2)
    shift = jnp.where(jnp.isfinite(lse), lse, 0)
    return jnp.exp(s - shift[..., None]), lse.swapaxes(1, 2)

  def forward(self, plan, queries, keys):
    q, k, v = queries.q, keys.k, keys.v
    p, lse = self._weights(plan, q, k)
    return jnp.einsum("bhlm,bmhe->blhe", p, v), lse

  def backward(self, plan, queries, keys):
    (q, _, dout, lse, delta), (k, v, _) = queries, keys
    p, _ = self._weights(plan, q, k, lse)
    dp = jnp.einsum("blhe,bmhe->bhlm", dout, v)
    ds = p * (dp - delta.swapaxes(1, 2)[..., None]) / np.sqrt(q.shape[-1])
    return (
      jnp.einsum("bhlm,bmhk->blhk", ds, k),
      jnp.einsum("bhlm,blhk->bmhk", ds, q),
      jnp.einsum("bhlm,blhe->bmhe", p, dout),
    )


@pytest.fixture
def untiled():
  registry.register("untiled", Untiled(), platforms=("cpu",))
  yield
  registry.unregister("untiled")


def test_registered_executor_obeys_the_laws_and_is_chosen(untiled):
  heads = catalogue.ALL[::14]
  laws.all_laws("untiled", heads)
  q, k, v, *_ = laws.random_inputs(24, 2)
  found = attend(q, k, v, Causal())
  expected = attend(q, k, v, Causal(), backend="untiled")
  np.testing.assert_array_equal(found, expected)
  assert (found != attend(q, k, v, Causal(), backend="streamed")).any()


def test_auto_tries_the_next_executor_and_a_named_one_says_why(untiled):
  q, k, v, *_ = laws.random_inputs(301, 1)
  found = attend(q, k, v, Causal())
  expected = attend(q, k, v, Causal(), backend="streamed")
  np.testing.assert_array_equal(found, expected)
  with pytest.raises(NotImplementedError, match="untiled.*at most 300"):
    attend(q, k, v, Causal(), backend="untiled")


def test_batched_executor_lowers_for_accelerators():
  heads = Local(96) | Strided(96), Block(128) | Summary(128, 32), BigBird(64)

  def step(q, k, v, dout):
    attention = functools.partial(attend, patterns=heads, backend="batched")
    return jax.vjp(attention, q, k, v)[1](dout)

  x = jax.ShapeDtypeStruct((1, 3072, 3, 64), jnp.bfloat16)
  traced = jax.jit(step).trace(x, x, x, x)
  for platform in ("cuda", "tpu", "rocm"):
    lowered = traced.lower(lowering_platforms=(platform,))
    assert "dot_general" in lowered.as_text()


@pytest.mark.parametrize(
  "pattern, tile",
  [(Local(128), 64), (Block(128), 128), (Strided(128), 96)],  # columns of 96
)
def test_tile_is_chosen_from_the_pattern(pattern, tile):
  plan = streamed.plan(pattern, 12_288)
  assert plan.tile == tile and plan.tables.single


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
