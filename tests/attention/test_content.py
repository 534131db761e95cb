"""Attention with patterns that follow the content, and their probes for leaks.

A choice has no gradient: only other arrays at later positions show whether the
keys of earlier ones depend on them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, content, networks
from helpers.cases import soak
from helpers.errors import refused

from sparse_transformer.attention import attend, find_pairs
from sparse_transformer.attention.content import found_tiles
from sparse_transformer.patterns import (
  LSH,
  Block,
  Local,
  Routing,
  Strided,
  TopBlocks,
)
from sparse_transformer.patterns.content import Chosen

ROUTING = Routing(5, 11)
ALONE = LSH(8, 4), ROUTING, TopBlocks(8, 3)
UNIONS = (
  Local(7) | LSH(9, 6, 2),
  Block(8) | TopBlocks(8, 3),
  ROUTING | Strided(9),
)
ALGEBRA = (
  Strided(5) | TopBlocks(6, 2) | LSH(3, 4, 2),
  Local(9),
  (LSH(5, 4) - ROUTING) & Local(30),
)
WIDTH = 8  # of queries and keys


@functools.partial(jax.jit, static_argnames="heads")
def realize(q, k, heads):
  return find_pairs(heads, q, k, laws.directions_of(heads))


@functools.partial(jax.jit, static_argnames=("heads", "backend", "tile"))
def run(*inputs, heads, backend="auto", tile=16):
  settings = dict(
    backend=backend,
    tile=tile,
    return_lse=True,
    patterns=heads,
    directions=laws.directions_of(heads),
  )
  attention = functools.partial(attend, **settings)
  with laws.settings_for(backend):
    return laws.with_gradients(attention, *inputs)


@pytest.mark.parametrize(
  "heads, n",
  [
    (ALONE, 50),
    (ALGEBRA, 53),
  ],
)
def test_realized_pairs_are_those_of_the_definition(heads, n):
  q, k, *_ = laws.random_inputs(n, 3)
  found = np.asarray(realize(q, k, heads))
  for h, pattern in enumerate(heads):
    of_head = q[:, :, h : h + 1], k[:, :, h : h + 1]
    centroids = laws.directions_of(heads)[ROUTING][h : h + 1]
    expected = content.by_definition(pattern, *of_head, centroids)
    np.testing.assert_array_equal(
      found[:, h], np.broadcast_to(expected[:, 0], found[:, h].shape)
    )
    assert not (found[:, h] & ~pattern.support().matrix(n)).any()
    for c in pattern.contents():
      if c is pattern:
        assert found[:, h].sum(-1).max() <= c.most_keys(n)


@pytest.mark.parametrize(
  "heads, n, backend, tile",
  [
    (UNIONS, 77, "batched", 8),
    soak(ALONE, 50, "auto", 16),
    soak(ALGEBRA, 53, "auto", 0),
  ],
)
def test_attention_is_that_over_the_realized_pairs(heads, n, backend, tile):
  inputs = laws.random_inputs(n, 3)
  mask = np.asarray(realize(*inputs[:2], heads))
  found = run(
    *inputs,
    heads=heads,
    backend=backend,
    tile=tile,
  )

  laws.assert_close(found, laws.reference_of_mask(mask, *inputs))


def test_sequence_of_one_position():
  q, k, v, *_ = laws.random_inputs(1, 3)
  run = functools.partial(attend, directions=laws.directions_of(ALONE))
  out = jax.jit(run, static_argnums=3)(q, k, v, ALONE)
  np.testing.assert_allclose(out[:, :, :2], v[:, :, :2], rtol=1e-6)
  assert (np.asarray(out)[:, :, 2] == 0).all()  # it has no past block


def test_outputs_depend_on_no_later_position_and_no_other_sequence():
  t = 45
  inputs = laws.random_inputs(77, 3)
  others = laws.random_inputs(77, 3, seed=1)
  run_unions = functools.partial(
    run,
    heads=UNIONS,
    backend="batched",
    tile=8,
  )
  before = run_unions(*inputs)
  later = [
    x.at[:, t:].set(y[:, t:]) for x, y in zip(inputs, others, strict=True)
  ]

  for x, y in zip(before[:2], run_unions(*later)[:2], strict=True):
    np.testing.assert_allclose(x[:, :t], y[:, :t], atol=1e-6)
  batch = [x.at[1].set(y[1]) for x, y in zip(inputs, others, strict=True)]
  for x, y in zip(before, run_unions(*batch), strict=True):
    np.testing.assert_array_equal(x[0], y[0])


# Leaks: keys of the past that change with the future.

N = 256
T = 120  # not at a border of blocks or chunks
OURS = LSH(16, 32, 4), LSH(48, 8), Routing(8, 32), TopBlocks(16, 3)


def skewed_pair(skew):
  """Vectors [B, n, H, K] around a common one, and others from T on."""
  random = np.random.RandomState(0)
  common = random.standard_normal((1, 1, 4, WIDTH))
  shape = 2, N, 4, WIDTH
  first = random.standard_normal(shape) + skew * common
  signs = np.sign(random.standard_normal((2, N, 1, 1)))
  second = random.standard_normal(shape) + skew * common * signs
  second[:, :T] = first[:, :T]
  return [
    3 * x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (first, second)
  ]


def changed(mask, other):
  """The share of the rows before T that differ."""
  differs = np.asarray(mask) != np.asarray(other)
  return differs[..., :T, :].any(-1).mean((0, 2))


VECTORS = LSH(16, 32, 4).directions(WIDTH).reshape(4, 16, WIDTH)
CENTROIDS = np.random.RandomState(0).standard_normal((8, WIDTH))
LEAKING = {
  "Reformer": lambda q: content.reformer_chunks(q, VECTORS, size=16),
  "routing": lambda q: content.routing_top(q, CENTROIDS, window=32),
}


@pytest.mark.parametrize(
  "name, skew, share",
  [
    ("Reformer", 0, 0.003),
    ("Reformer", 1, 0.37),
    ("routing", 0, 0.44),
    ("routing", 1, 0.68),
  ],
)
def test_probe_finds_patterns_that_leak(name, skew, share):
  """The shares are those of docs/patterns.md."""
  masks = [content.over_heads(LEAKING[name], x) for x in skewed_pair(skew)]
  assert changed(*masks).mean() == pytest.approx(share, abs=0.005)


@pytest.mark.parametrize("skew", [0, 1])
def test_no_pattern_leaks(skew):
  masks = (realize(x, x, OURS) for x in map(jnp.float32, skewed_pair(skew)))
  np.testing.assert_array_equal(changed(*masks), 0)


def test_top_blocks_with_the_own_block_are_those_of_moba():
  q, k, *_ = laws.random_inputs(77, 3)
  pattern = Block(8) | TopBlocks(8, 3)
  found = realize(q, k, (pattern,) * 3)
  moba = functools.partial(
    content.moba,
    size=8,
    top_k=4,
  )

  np.testing.assert_array_equal(found, content.over_heads(moba, q, k))


# Programs.


@pytest.mark.parametrize("pattern", [TopBlocks(8, 3), LSH(8, 4, 2)])
def test_no_two_sums_go_to_the_same_place(pattern):
  def loss(q, k, v):
    with laws.settings_for("batched"):
      return attend(q, k, v, pattern, backend="batched").sum()

  q, k, v, *_ = laws.random_inputs(40, 3)
  program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, v)
  equations = networks.equations(program.jaxpr)
  added = [e for e in equations if str(e.primitive) == "scatter-add"]

  assert all(e.params["unique_indices"] for e in added)
  assert bool(added) == isinstance(pattern, TopBlocks)


@pytest.mark.parametrize(
  "patterns, directions, words",
  [
    (ROUTING, None, r"Routing\(5, 11\) needs its directions.*\[3, 5, 8\]"),
    (Local(3), {ROUTING: np.ones((3, 5, 8))}, "no head's pattern takes"),
    (ROUTING, {ROUTING: np.ones((2, 5, 8))}, r"shape \[3, 5, 8\].*\[2, 5, 8"),
  ],
)
def test_wrong_directions_are_rejected(patterns, directions, words):
  q, k, v, *_ = laws.random_inputs(9, 3)
  with refused(words):
    attend(q, k, v, patterns, directions=directions)


@pytest.mark.parametrize("size", [3, 50, 10**6])
def test_tables_of_blocks_do_not_grow_beyond_the_positions(size):
  blocks = jnp.full((1, 1, 50, 1), -1, jnp.int32)

  def lay_out(x):
    return found_tiles.lay_out(Chosen(x, size), tile=16).keys

  keys = jax.eval_shape(lay_out, blocks)
  assert keys.shape[-1] <= 50 + size % 50
