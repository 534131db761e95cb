"""Attention over blocks of keys that the caller passes, whatever these are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, networks, runs
from helpers.cases import listed
from helpers.errors import refused
from jax.sharding import AxisType, PartitionSpec as P

from sparse_transformer.attention import (
  SAVED_NAMES,
  attend,
  attend_next,
  fill_cache,
  init_cache,
)
from sparse_transformer.patterns import Block, Known, Local, Selected, TopBlocks

HEADS = 4
N = 53
SIZE, NUM = 6, 5
PATTERN = Selected(SIZE, NUM)
UNION = Local(7) | PATTERN
ALGEBRA = (PATTERN - Local(9)) & Block(30)
LIMITS = np.iinfo(np.int32)


def blocks_of(heads, n=N, batch=2, seed=0):
  """Any integers: past, own and later blocks, none, repeated and absurd ones.

  The first sequence has none for some queries.
  """
  random = np.random.default_rng(seed)
  shape = batch, heads, n, NUM
  blocks = random.integers(-2, n // SIZE + 3, shape)
  absurd = random.choice([LIMITS.min, LIMITS.max, LIMITS.max // SIZE, n], shape)
  blocks = np.where(random.random(shape) < 0.1, absurd, blocks)
  blocks[0, :, n // 2 : n // 2 + 5] = -1
  return blocks.astype(np.int32)


def pairs_of(blocks, heads, segments=None):
  """The pairs [B, H, n, n] of `PATTERN`, one by one."""
  batch, given, n, _ = blocks.shape
  mask = np.zeros((batch, heads, n, n), bool)
  for b, h, t in np.ndindex(batch, heads, n):
    for block in map(int, blocks[b, h * given // heads, t]):
      keys = range(block * SIZE, (block + 1) * SIZE)
      if block >= 0 and keys[-1] < t:
        mask[b, h, t, list(keys)] = True
  if segments is not None:
    mask &= (segments[:, :, None] == segments[:, None])[:, None]
  return mask


@functools.partial(jax.jit, static_argnames=("pattern", "backend", "tile"))
def run(*inputs, blocks, pattern, backend="auto", tile=0, segments=None):
  attention = functools.partial(
    attend,
    patterns=pattern,
    directions={PATTERN: blocks},
    segments_BL=segments,
    backend=backend,
    tile=tile,
    return_lse=True,
  )
  with laws.settings_for(backend):
    return laws.with_gradients(attention, *inputs)


@pytest.mark.parametrize(
  "pattern, given, backend, is_packed",
  listed(
    default=[
      (PATTERN, 1, "auto", False),
      (UNION, 2, "batched", True),
      (ALGEBRA, HEADS, "dense", False),
    ],
    every=itertools.product(
      (PATTERN, UNION, ALGEBRA),
      (1, 2, HEADS),
      ("auto", "batched", "dense"),
      (False, True),
    ),
  ),
)
def test_any_integers_are_those_of_a_loop_that_drops(
  pattern, given, backend, is_packed
):
  """In values and in gradients; the reference is in float64."""
  inputs = laws.random_inputs(N, HEADS, group=2)
  blocks = blocks_of(given)
  options = laws.Options(packed=is_packed)
  segments = options.segments(2, N)
  mask = pairs_of(blocks, HEADS, segments)
  if pattern is UNION:
    mask |= Local(7).matrix(N)
  if pattern is ALGEBRA:
    mask &= Block(30).matrix(N) & ~Local(9).matrix(N)
  if segments is not None:
    mask &= (segments[:, :, None] == segments[:, None])[:, None]

  found = run(
    *inputs,
    blocks=blocks,
    pattern=pattern,
    backend=backend,
    segments=segments,
  )
  laws.assert_close(found, laws.reference_of_mask(mask, *inputs))


def test_queries_without_blocks_get_nothing_and_give_no_gradients():
  inputs = laws.random_inputs(N, HEADS)
  blocks = blocks_of(HEADS)
  has_none = ~pairs_of(blocks, HEADS).any(-1).swapaxes(1, 2)
  assert has_none[0, N // 2 : N // 2 + 5].all()
  out, _, dq, *_ = run(*inputs, blocks=blocks, pattern=PATTERN)
  assert (np.asarray(out)[has_none] == 0).all()
  assert (np.asarray(dq)[has_none] == 0).all()

  attention = functools.partial(attend, *inputs[:3], PATTERN, return_lse=True)
  _, lse = attention(directions={PATTERN: blocks})
  np.testing.assert_array_equal(np.asarray(lse) == -np.inf, has_none)


def test_what_top_blocks_chooses_is_what_it_has():
  q, k, v, *_ = laws.random_inputs(N, HEADS, group=2)
  top = TopBlocks(SIZE, NUM)
  blocks = top.find_buckets(Known(q, k))
  expected = attend(q, k, v, top)
  found = attend(q, k, v, PATTERN, directions={PATTERN: blocks})
  np.testing.assert_allclose(found, expected, atol=1e-6)


def test_no_gradient_reaches_a_later_key():
  t = 31
  q, k, v, *_ = laws.random_inputs(N, HEADS)

  def early(k, v):
    directions = {PATTERN: blocks_of(1)}
    return (attend(q, k, v, UNION, directions=directions)[:, :t] ** 2).sum()

  for x in jax.grad(early, (0, 1))(k, v):
    assert (np.asarray(x)[:, t:] == 0).all()
    assert (np.asarray(x)[:, : t - 7] != 0).any()


def test_rematerialization_keeps_what_was_found():
  q, k, v, *_ = laws.random_inputs(N, HEADS)

  def loss(q):
    directions = {PATTERN: blocks_of(1)}
    return (attend(q, k, v, UNION, directions=directions) ** 2).sum()

  names = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)
  kept = jax.checkpoint(loss, policy=names)
  np.testing.assert_array_equal(jax.grad(kept)(q), jax.grad(loss)(q))


@pytest.mark.parametrize("given", [1, 2, HEADS])
def test_steps_with_their_blocks_are_rows_of_attend(given):
  start = 20
  q, k, v, *_ = laws.random_inputs(N, HEADS, group=2)
  blocks = blocks_of(given)
  expected = attend(q, k, v, UNION, directions={PATTERN: blocks})
  cache = init_cache(
    UNION,
    length=N,
    batch=2,
    num_heads=HEADS,
    num_key_heads=2,
    qk_width=q.shape[-1],
    value_width=v.shape[-1],
    dtype=q.dtype,
  )
  cache = fill_cache(
    cache,
    q[:, :start],
    k[:, :start],
    v[:, :start],
    directions={PATTERN: blocks[:, :, :start]},
  )

  def step(cache, t):
    directions = {PATTERN: jnp.asarray(blocks)[:, :, t]}
    arrays = q[:, t], k[:, t], v[:, t]
    out, cache = attend_next(cache, *arrays, t, directions=directions)
    return cache, out

  _, outs = jax.lax.scan(step, cache, jnp.arange(start, N))
  np.testing.assert_allclose(
    outs.swapaxes(0, 1), expected[:, start:], atol=1e-5
  )


def test_sequences_without_a_batch_axis():
  q, k, v, *_ = laws.random_inputs(N, HEADS, batch=1)
  blocks = blocks_of(1, batch=1)
  one = attend(q[0], k[0], v[0], UNION, directions={PATTERN: blocks[0]})
  batch = attend(q, k, v, UNION, directions={PATTERN: blocks})
  np.testing.assert_array_equal(one, batch[0])


def test_devices_have_the_blocks_of_their_sequences_and_heads():
  runs.on_devices(4, check_devices)


def check_devices():
  n = 48
  q, k, v, *_ = laws.random_inputs(n, HEADS)
  mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
  for given in (1, HEADS):
    directions = {PATTERN: blocks_of(given, n)}
    expected = attend(q, k, v, UNION, directions=directions)
    for spec in (P("x", None, "y"), P("x", "y")):
      attention = functools.partial(
        attend,
        patterns=UNION,
        spec=spec,
        directions=directions,
      )
      with jax.set_mesh(mesh):
        found = jax.jit(attention)(q, k, v)
      np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
  "blocks, words",
  [
    (None, r"needs its directions, an array \[2, 4, 53, 5\]"),
    (blocks_of(3), r"have shape \[2, 4, 53, 5\].*\[2, 3, 53, 5\]"),
    (blocks_of(1)[:1], r"have shape \[2, 4, 53, 5\].*\[1, 4, 53, 5\]"),
    (blocks_of(1)[..., :2], r"have shape \[2, 4, 53, 5\]"),
    (blocks_of(1).astype("i8"), "must be int32, got int64"),
    (blocks_of(1).tolist(), "must be int32, got list"),
  ],
)
def test_wrong_blocks_are_rejected(blocks, words):
  q, k, v, *_ = laws.random_inputs(N, HEADS)
  directions = None if blocks is None else {PATTERN: blocks}
  with refused(words):
    attend(q, k, v, UNION, directions=directions)


def test_a_network_has_no_blocks():
  with refused(r"Selected\(6, num=5\) needs blocks, .*network does not have"):
    networks.config(patterns=((UNION,),))
