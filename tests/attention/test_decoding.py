"""Tests of attention/decoding.py: steps against rows of the reference."""

import functools
import itertools

import hypothesis
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, catalogue
from helpers.cases import listed
from helpers.errors import refused
from hypothesis import strategies as st

from sparse_transformer import attention
from sparse_transformer.attention.cached_group import plan_cache
from sparse_transformer.patterns import (
  LSH,
  Block,
  Causal,
  Local,
  Routing,
  Strided,
  Summary,
  TopBlocks,
)

BATCH = 2
HEADS = 4
WIDTH = 8
VALUES = 6
LENGTH = 40

# Slots.


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
  st.sampled_from(catalogue.CAUSAL), st.integers(1, 70), st.data()
)
def test_slots_hold_the_keys_of_every_row(pattern, n, data):
  plan = plan_cache(pattern, n)
  matrix = pattern.matrix(n)
  # At each query, the keys so far that it or a later one reads.
  i = np.arange(n)
  last = np.where(matrix, i[:, None], -1).max(0)
  is_held = (i <= i[:, None]) & (last >= i[:, None])
  assert plan.size == is_held.sum(1).max()

  start = data.draw(st.integers(0, n))
  # First what a prompt leaves, then what the steps write.
  held = plan.held(start)
  for t in range(start, min(n, start + 20)):
    held[plan.slots[t]] = t
    assert np.isin(np.flatnonzero(matrix[t]), held[: plan.size]).all()


@pytest.mark.parametrize(
  "pattern, size",
  [
    (Causal(), 2**15),
    (Local(1024) | Strided(1024), 2**15 - 1023),
    (Block(1024), 1024),
    (Summary(1024, 32), 32 * 32),
  ],
  ids=str,
)
def test_slots_of_long_sequences(pattern, size):
  assert plan_cache(pattern, 2**15).size == size


# Steps.


def check_steps(
  heads, num_key_heads, starts=(0,), n=LENGTH, dtype="float32", **options
):
  """After prompts, steps in the second of two layers give rows of `attend`."""
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.normal(size=(BATCH, n, *shape)), dtype)
    for shape in (
      (len(heads), WIDTH),
      (num_key_heads, WIDTH),
      (num_key_heads, VALUES),
    )
  )
  options |= dict(directions=laws.directions_of(heads))
  reference = functools.partial(
    attention.attend,
    patterns=heads,
    backend="dense",
  )
  expected = jax.jit(functools.partial(reference, **options))(q, k, v)

  @jax.jit
  def fill(layer, *prompt):
    cache = attention.init_cache(
      heads,
      length=n,
      batch=BATCH,
      num_heads=len(heads),
      num_key_heads=num_key_heads,
      qk_width=WIDTH,
      value_width=VALUES,
      dtype=dtype,
      layers=2,
    )
    given = dict(
      layer=layer,
      directions=options["directions"],
    )
    return attention.fill_cache(cache, *prompt, **given) if prompt else cache

  @jax.jit
  def step(cache, t, layer, *arrays):
    inputs = *(x[:, t] for x in arrays), t
    return attention.attend_next(cache, *inputs, **options, layer=layer)

  # A loop over one program, whatever the starts.
  for start in starts:
    layer = jnp.int32(1)
    rows = []
    cache = fill(layer, *(x[:, :start] for x in (q, k, v) if start))
    for t in range(start, n):
      out, cache = step(cache, jnp.int32(t), layer, q, k, v)
      assert out.dtype == v.dtype
      rows.append(np.asarray(out, np.float32))
    np.testing.assert_allclose(
      np.stack(rows, 1),
      np.asarray(expected[:, start:], np.float32),
      atol=2e-5 if dtype == "float32" else 0.02,
    )

  assert step._cache_size() == 1


# Four patterns at once, so that fewer programs are compiled.
FOURS = [
  (catalogue.CAUSAL * 2)[first : first + HEADS]
  for first in range(0, len(catalogue.CAUSAL), HEADS)
]
GIVEN = tuple(pattern & Causal() for pattern in catalogue.given(LENGTH)[:HEADS])


@pytest.mark.parametrize(
  "heads, num",
  listed(
    default=[
      (FOURS[0], HEADS),
      (FOURS[2], 1),
      (FOURS[4], 2),
      (GIVEN, HEADS),
    ],
    every=itertools.product(FOURS, (HEADS, 1, 2)),
  ),
)
def test_steps_are_rows_of_attend(heads, num):
  check_steps(heads, num)


def test_query_heads_share_key_heads():
  wide = Local(5) | Strided(5)
  narrow = Strided(9)
  check_steps((wide, wide, narrow, narrow), 2, (1, LENGTH - 1))
  check_steps((narrow, wide, wide, wide), 1, (3,))


def test_a_group_keeps_each_key_head_once():
  heads = (Local(5), Local(5), Strided(5), Strided(5)) * 2
  cache = make(heads, num_heads=8, num_key_heads=2)
  # All but a query's own key and the last four are free again.
  assert [x.k.shape[2:4] for x in cache.groups] == [(2, 6), (2, 7)]


ROUTING = Routing(5, 11)
CONTENT = (
  (LSH(8, 4, 2), ROUTING, TopBlocks(8, 3), Strided(5)),
  (Strided(5) | TopBlocks(6, 2) | LSH(60, 4, 2),) * HEADS,  # LSH of all keys
  ((LSH(5, 4) - ROUTING) & Local(30), Local(6)) * 2,
  ((Local(9) | LSH(4, 4, 3)) & (TopBlocks(6, 3) | Strided(4)),) * HEADS,
)


@pytest.mark.parametrize(
  "heads, num",
  listed(
    default=[
      (CONTENT[0], HEADS),
      (CONTENT[2], 2),
      (CONTENT[3], 1),
    ],
    every=itertools.product(CONTENT, (HEADS, 2, 1)),
  ),
)
def test_steps_follow_the_content(heads, num):
  check_steps(heads, num, (0, 23))


@pytest.mark.parametrize("n", [1, 8])
def test_steps_of_short_sequences(n):
  never = catalogue.Masked(lambda q, k: False)
  heads = LSH(8, 2) | TopBlocks(7, 2), Local(1), Strided(9, 1), never
  check_steps(heads, 1, n=n)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_and_sinks_are_those_of_attend(dtype):
  heads = Local(5), Strided(9), catalogue.Fifths(), ROUTING
  sinks = jnp.array([-1.0, 0.0, 2.0, 200.0])
  options = dict(
    scale=0.7,
    softcap=2.0,
    sinks_H=sinks,
  )
  heads = heads[:2] * 2 if dtype == "bfloat16" else heads  # labels round
  check_steps(heads, 2, (5,), dtype=dtype, **options)


@pytest.mark.parametrize("heads", [(Local(5), Strided(9)) * 2, (Causal(),) * 4])
def test_a_bias_is_that_of_attend(heads):
  bias = np.random.default_rng(0).normal(size=(HEADS, 2 * LENGTH - 1))
  bias[0, : LENGTH - 3] = bias[1, LENGTH + 3 :] = -np.inf
  check_steps(heads, 2, (5,), bias_HD=jnp.array(bias))


def test_labels_are_small_beside_keys_and_values():
  def numbers(pattern):
    shape = dict(length=12_288, qk_width=64, num_heads=1)
    cache = jax.eval_shape(lambda: make(pattern, **shape))
    return [x.shape[-1] for x in cache.groups[0].buckets]

  assert numbers(LSH(64, 192, 4)) == [4]
  assert numbers(Routing(64, 128) | Local(128)) == [1]
  assert numbers(TopBlocks(64, 8)) == [8]
  assert numbers(Local(1024)) == []


# Errors.


def make(patterns="Local(3)", **options):
  sizes = dict(
    length=10,
    batch=2,
    num_heads=2,
    qk_width=4,
    dtype="float32",
  )
  return attention.init_cache(patterns, **sizes | options)


@pytest.mark.parametrize(
  "call, message",
  [
    (lambda: make(Local(3, causal=False)), "see later keys"),
    (lambda: make("LSH(3, 4) | Full()"), "see later keys"),
    (lambda: make(num_heads=4, num_key_heads=3), "must divide num_heads=4"),
    (lambda: make(num_key_heads=0), "num_key_heads=0 must divide"),
    (lambda: step(make(), t=10), "t=10 must lie between 0 and 9"),
    (lambda: step(make(), t=jnp.arange(2)), r"t=\[0 1\] .*use jax.vmap"),
    (lambda: step(make(), t=1.0), "t=1.0 must be an integer"),
    (lambda: step(make(), layer=1), "layer=1 must lie between 0 and 0"),
    (lambda: step(make(value_width=5)), r"v must be .* of shape \[2, 2, 5\]"),
    (lambda: step(make(num_key_heads=1)), r"k must be .* of shape \[2, 1, 4\]"),
    (lambda: step(make(ROUTING)), "needs its directions"),
    (lambda: step(make(), sinks_H=jnp.zeros(3)), "sinks must be"),
    (lambda: fill(make(), 11), "a prompt of 11 positions"),
    (lambda: fill(make(LSH(3, 4)), 2), r"q must be .* of shape \[2, 2, 2, 4\]"),
  ],
)
def test_error_says_what_to_change(call, message):
  with refused(message) as caught:
    call()
  assert "\n" not in str(caught.value)


def step(cache, t=0, **options):
  return attention.attend_next(cache, *jnp.zeros((3, 2, 2, 4)), t, **options)


def fill(cache, count):
  x = jnp.zeros((2, count, 2, 4))
  return attention.fill_cache(cache, None, x, x)


def test_the_batch_of_a_cache_can_be_symbolic():
  (batch,) = jax.export.symbolic_shape("b")
  cache = jax.eval_shape(lambda: make(batch=batch))
  assert cache.groups[0].k.shape[1] == batch


def test_layers_of_a_cache_have_prompts_of_their_own():
  x = jnp.ones((2, 4, 2, 4))
  filled = fill(make(layers=2), 4)  # the first layer with zeros
  (group,) = attention.fill_cache(filled, None, x, x, layer=1).groups

  assert group.k[1].any()
  assert not group.k[0].any()
  assert group.positions.tolist() == [3, -1, 2, -1]
