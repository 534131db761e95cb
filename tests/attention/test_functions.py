"""Attention over pairs that a function or a matrix gives.

That backends agree with their definition is in test_backends.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, catalogue
from helpers.errors import refused
from jax.sharding import AxisType, PartitionSpec

from sparse_transformer.attention import (
  as_attention_fn,
  attend,
  dispatch,
  init_cache,
)
from sparse_transformer.patterns import (
  LSH,
  Causal,
  Local,
  Routing,
  explicit,
  where,
)

N = 53
RANDOM = np.random.default_rng(0).random((N, N)) < 0.2
SPARSE = explicit(RANDOM)
PAST = explicit(np.tril(RANDOM))


def test_equal_matrices_share_a_compiled_program():
  q, k, v, *_ = laws.random_inputs(N, 2)
  compiled = dispatch._on_devices
  attend(q, k, v, SPARSE)
  before = compiled._cache_size()
  attend(q, k, v, explicit(RANDOM.copy()))
  assert compiled._cache_size() == before
  attend(q, k, v, explicit(~RANDOM))
  assert compiled._cache_size() == before + 1


@pytest.mark.parametrize("content", [LSH(8, 4), Routing(3, 8)])
def test_they_combine_with_content(content):
  heads = content & where(catalogue.similar), content | PAST
  q, k, v, *_ = laws.random_inputs(N, len(heads))
  run = functools.partial(
    attend,
    patterns=heads,
    directions=laws.directions_of(heads),
  )
  found = jax.jit(run)(q, k, v)
  expected = jax.jit(functools.partial(run, backend="dense"))(q, k, v)

  np.testing.assert_allclose(found, expected, atol=1e-5)


def test_patterns_that_see_later_keys_attend_but_are_not_decoded():
  q, k, v, *_ = laws.random_inputs(N, 2)
  causal = attend(q, k, v, SPARSE & Causal())

  np.testing.assert_allclose(attend(q, k, v, PAST), causal, atol=1e-6)
  assert np.abs(attend(q, k, v, SPARSE) - causal).max() > 0.1

  shape = dict(
    length=N,
    batch=2,
    num_heads=2,
    qk_width=8,
    dtype=q.dtype,
  )

  for pattern in (SPARSE, where(lambda q, k: k >= q)):
    with refused("lets queries see later keys"):
      init_cache(pattern, **shape)


def test_another_number_of_positions_is_refused():
  q, k, v, *_ = laws.random_inputs(N - 1, 2)
  shape = dict(
    length=N - 1,
    batch=2,
    num_heads=2,
    qk_width=8,
    dtype=q.dtype,
  )

  for use in (
    lambda: attend(q, k, v, SPARSE),
    lambda: attend(q, k, v, (Causal(), Local(3) | PAST)),
    lambda: jax.jit(lambda x: attend(x, k, v, PAST))(q),
    lambda: init_cache(PAST, **shape),
    lambda: as_attention_fn(SPARSE)(q, k, v),
  ):
    with refused("53 positions, but 52"):
      use()


def test_functions_are_evaluated_wherever_attention_is_traced():
  # A table made while a program is traced is not known then, unless the
  # function itself makes it.
  words = np.arange(N) // 9
  pattern = where(lambda q, k: jnp.asarray(words)[q] == jnp.asarray(words)[k])
  q, k, v, *_ = laws.random_inputs(N, 2)
  expected = attend(q, k, v, explicit(words[:, None] == words))

  def single(*x):
    return attend(*x, pattern)

  for run in (
    single,
    jax.jit(single),
    jax.vmap(single),
    jax.checkpoint(single),
  ):
    np.testing.assert_allclose(run(q, k, v), expected, atol=1e-6)

  def of_argument(table):
    return attend(q, k, v, where(lambda q, k: table[q] == table[k]))

  with refused("known before tracing"):
    jax.jit(of_argument)(words)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_functions_are_evaluated_within_a_mesh(axis_type):
  found = []
  split = PartitionSpec("x")

  def body(x):
    pattern = where(lambda q, k: table[q] == table[k])
    found.append(pattern.pairs(N))
    return x

  with jax.set_mesh(jax.make_mesh((1,), ("x",), (axis_type,))):
    table = jnp.arange(N) // 10
    x = jax.device_put(jnp.arange(8.0), split)
    jax.jit(
      jax.shard_map(
        body,
        in_specs=split,
        out_specs=split,
      )
    )(x)

  assert found == [5 * 10**2 + 3**2]
