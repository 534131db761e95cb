"""`attend` on several devices: within `jax.shard_map`, on explicit axes."""

import functools
import itertools

import jax
import pytest
from helpers import backend_laws as laws, runs
from helpers.cases import soak
from jax.sharding import (
  AbstractMesh,
  AxisType,
  NamedSharding,
  PartitionSpec as P,
)

from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.backends.triton import Triton
from sparse_transformer.patterns import LSH, Causal, Local, Strided, TopBlocks

BACKENDS = "auto", "dense"  # "auto" traces every backend
N = 40
TILE = 16
TWO_PARTS = Local(5) | Strided(7)
BY_HEAD = Local(5), Strided(7), Local(5), Causal()
AT_RUN_TIME = Local(5) | LSH(4, 6, 2) | TopBlocks(6, 2)
unwrapped = lambda attention: attention
BATCH = P("x")
HEADS = P(None, None, "y")
BOTH = P("x", None, "y")


def inputs(options=laws.PLAIN, heads=4):
  return laws.random_inputs(
    N,
    heads,
    batch=4,
    group=options.group,
  )


def results(
  patterns, backend, shard, *arrays, tile=TILE, options=laws.PLAIN, **more
):
  """(out, lse, dq, dk, dv), with attention wrapped by `shard`."""
  settings = options.settings(*arrays[0].shape[:2]) | more
  attention = functools.partial(
    attend,
    patterns=patterns,
    backend=backend,
    tile=tile,
    return_lse=True,
    **settings,
  )
  return laws.with_gradients(shard(attention), *arrays)


def shard_map(spec, **settings):
  return functools.partial(
    jax.shard_map,
    in_specs=spec,
    out_specs=spec,
    **settings,
  )


def entire(spec, x):
  """A spec with an entry for each axis of x."""
  return P(*spec, *(None,) * (x.ndim - len(spec)))


def types(function, axis_type, *specs):
  """What a function of `inputs` returns on 2 x 2 devices; it is only traced."""
  mesh = AbstractMesh((2, 2), ("x", "y"), axis_types=(axis_type,) * 2)
  with jax.sharding.use_abstract_mesh(mesh):
    return jax.eval_shape(
      function,
      *(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, s))
        for x, s in zip(jax.eval_shape(inputs), specs, strict=True)
      ),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
  "spec, patterns",
  [
    (BATCH, BY_HEAD),
    (BOTH, TWO_PARTS),
    (BOTH, AT_RUN_TIME),
  ],
)
def test_attend_runs_within_shard_map(spec, patterns, backend):
  run = functools.partial(results, patterns, backend, shard_map(spec))
  found = types(run, AxisType.Auto, *(spec,) * 5)
  q, k, v, _, dlse = jax.eval_shape(inputs)
  assert [x.shape for x in found] == [x.shape for x in (v, dlse, q, k, v)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
  "spec, patterns",
  [
    (BATCH, BY_HEAD),
    (HEADS, BY_HEAD),
    (BOTH, TWO_PARTS),
    (P(None, "x"), TWO_PARTS),
    (P("x", "y"), AT_RUN_TIME),
  ],
)
def test_results_are_sharded_as_the_queries_on_explicit_axes(
  spec, patterns, backend
):
  run = functools.partial(results, patterns, backend, unwrapped)
  for x in types(run, AxisType.Explicit, *(spec,) * 5):
    assert x.sharding.spec == entire(spec, x)


def test_keys_and_values_may_be_sharded_unlike_the_queries():
  specs = BATCH, P(), HEADS, BATCH, BATCH
  run = functools.partial(results, TWO_PARTS, "auto", unwrapped)
  found = types(run, AxisType.Explicit, *specs)
  for x, spec in zip(found, (BATCH, BATCH, *specs[:3]), strict=True):
    assert x.sharding.spec == entire(spec, x)


# One process checks all, since it takes seconds to start.
@pytest.mark.parametrize(
  "backend, amount",
  [
    ("streamed", "few"),
    soak("streamed", "all"),
    soak("batched", "all"),
  ],
)
def test_results_on_four_devices_are_those_of_the_definition(backend, amount):
  runs.on_devices(4, check_results, backend, amount)


def check_results(backend, amount):
  check_groups_and_segments(backend, amount)
  check_explicit_axes(backend, amount)
  if amount == "few":
    check_kernels()


def check_explicit_axes(backend, amount):
  arrays = inputs()
  mesh = jax.make_mesh((2, 2), ("x", "y"))
  sharded = [jax.device_put(x, NamedSharding(mesh, BOTH)) for x in arrays]

  def check(patterns, shard, words):
    run = jax.jit(functools.partial(results, patterns, backend, shard))
    program = run.lower(*sharded).compile()
    assert not [word for word in words if word in program.as_text()]
    heads = patterns if isinstance(patterns, tuple) else (patterns,) * 4
    laws.assert_close(program(*sharded), laws.reference(*arrays, heads))

  # Sequences and heads with one pattern do not interact.
  exchanges = "all-gather", "all-reduce", "all-to-all", "permute"
  with jax.set_mesh(mesh):
    check(TWO_PARTS, unwrapped, exchanges)
    if amount == "all":
      check(TWO_PARTS, shard_map(BOTH), exchanges)
      check(BY_HEAD, unwrapped, ())


# Key heads are split as query heads, or in parts of the groups of one.
def check_groups_and_segments(backend, amount):
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  cases = (
    (BOTH, TWO_PARTS),
    (BATCH, TopBlocks(6, 2) | Local(5)),
    (P("x", "y"), TWO_PARTS),
    (P(None, ("x", "y")), Local(5)),
  )
  cases = [(g, *case) for g, case in itertools.product((2, 4, 8), cases)]
  if amount == "few":
    cases = cases[9], cases[6]
  with jax.set_mesh(mesh):
    for group, spec, pattern in cases:
      if group == 8 and spec == BOTH:
        continue  # one key head cannot be split
      options = laws.Options(
        group=group,
        packed=True,
        softcap=1.5,
      )
      arrays = inputs(options, heads=8)
      run = functools.partial(
        results, pattern, backend, unwrapped, options=options
      )
      found = jax.jit(functools.partial(run, spec=spec))(*arrays)
      if pattern.contents():
        expected = jax.jit(
          functools.partial(
            results, pattern, "dense", unwrapped, options=options
          )
        )(*arrays)
      else:
        expected = laws.reference(*arrays, (pattern,) * 8, options)
      laws.assert_close(found, expected)


def check_kernels():
  registry.register("interpreted", Triton(interpret=True))
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  arrays = laws.random_inputs(N, 4, 16, 16, batch=4)
  settings = BY_HEAD, "interpreted"

  def check(spec, exchanges):
    sharded = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]
    program = laws.run.lower(*sharded, *settings, 32).compile()
    assert ("all-" in program.as_text()) == exchanges
    laws.assert_close(program(*sharded), laws.reference(*arrays, BY_HEAD))

  with jax.set_mesh(mesh):
    # Interpreted gathers do not say how their results vary.
    wrap = shard_map(BATCH, check_vma=False)
    run = jax.jit(functools.partial(results, *settings, wrap, tile=32))
    laws.assert_close(run(*arrays), laws.reference(*arrays, BY_HEAD))
    check(P(("x", "y")), exchanges=False)
    check(BOTH, exchanges=True)  # heads have lists of their own

  laws.run.clear_cache()
  check(BATCH, exchanges=True)  # without a mesh in context
