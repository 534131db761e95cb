import functools

import catalogue
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer import attention, patterns
from sparse_transformer.attention import (
  merged as blocked,
  streamed as sequential,
)
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Dilated,
  Local,
  Strided,
  Summary,
)

SCHEDULES = ["blocked_sequential", "blocked_parallel"]
SETTINGS = dict(stride=12, window=12, width=3, num_summaries=2)


def reference(q, k, v, dout, dlse, heads):
  """(out, lse, dq, dk, dv) in float64 NumPy, from the definition.

  Arrays are [batch, n, heads, ...]; lse of rows without keys is put to 0.
  """
  q, k, v, dout, dlse = (
    np.asarray(x.astype(jnp.float32), np.float64).swapaxes(1, 2)
    for x in (q, k, v, dout, dlse)
  )
  n, scale = q.shape[2], 1 / np.sqrt(q.shape[3])
  mask = np.stack([pattern.matrix(n) for pattern in heads])
  s = np.where(mask, q @ k.swapaxes(2, 3) * scale, -np.inf)
  empty = ~mask.any(-1, keepdims=True)
  e = np.exp(s - np.where(empty, 0, s.max(-1, keepdims=True)))
  total = e.sum(-1, keepdims=True) + empty
  p = e / total
  out = p @ v
  lse = np.where(empty, 0, np.log(total) + s.max(-1, keepdims=True))
  dp = dout @ v.swapaxes(2, 3)
  ds = p * (dp - (dout * out).sum(-1, keepdims=True) + dlse[..., None])
  grads = ds @ k * scale, ds.swapaxes(2, 3) @ q * scale, p.swapaxes(2, 3) @ dout
  results = out, lse[..., 0], *grads
  return [x.swapaxes(1, 2) for x in results]


@functools.partial(jax.jit, static_argnums=(5, 6, 7))
def run(q, k, v, dout, dlse, heads, backend, tile):
  """(out, lse, dq, dk, dv); lse of rows without keys is put to 0."""

  def attend(q, k, v):
    out, lse = attention.attend(
      q, k, v, heads, backend=backend, tile=tile, return_lse=True
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)

  result, vjp = jax.vjp(attend, q, k, v)
  return *result, *vjp((dout, dlse))


def arrays(n, heads, k=8, e=12, batch=2, dtype=jnp.float32):
  """q, k, v and the cotangents of out and lse."""
  keys = jax.random.split(jax.random.key(n), 5)
  shapes = [(batch, n, heads, width) for width in (k, k, e, e)]
  shapes.append((batch, n, heads))
  *arrays, dlse = (
    jax.random.normal(*x) for x in zip(keys, shapes, strict=True)
  )
  return *(x.astype(dtype) for x in arrays), dlse


def check(n, heads, backend, tile, dtype=jnp.float32, tolerance=2e-5):
  inputs = arrays(n, len(heads), dtype=dtype)
  expected = reference(*inputs, heads)
  found = run(*inputs, tuple(heads), backend, tile)
  assert found[0].dtype == dtype and found[1].dtype == jnp.float32
  for name, x, y in zip(
    "out lse dq dk dv".split(), found, expected, strict=True
  ):
    error = np.abs(np.asarray(x, np.float64) - y).max()
    assert error <= tolerance * max(np.abs(y).max(), 1e-6), (name, error)


def chunks(items, size):
  return [items[i : i + size] for i in range(0, len(items), size)]


# Patterns run as the heads of one call: fewer programs to compile.
@pytest.mark.parametrize("backend", ["dense", *SCHEDULES])
@pytest.mark.parametrize("heads", chunks(catalogue.ALL, 4), ids=str)
@pytest.mark.usefixtures("optimized")
def test_every_pattern_is_what_its_definition_says(heads, backend):
  check(53, heads, backend, 16)


@pytest.mark.parametrize("backend", SCHEDULES)
@pytest.mark.parametrize("n, tile", [(1, 16), (2, 0), (15, 16), (16, 16)])
def test_lengths_around_one_tile(n, tile, backend):
  check(n, [Local(5) | Strided(5), catalogue.Fifths()], backend, tile)


@pytest.mark.parametrize("backend", SCHEDULES)
@pytest.mark.parametrize("n, tile", [(17, 16), (131, 0), (211, 0), (192, 64)])
def test_lengths_of_several_tiles(n, tile, backend):
  heads = Local(5) | Strided(5), Block(7) | Summary(7, 2), Causal(), BigBird(8)
  check(n, heads, backend, tile)


@pytest.mark.parametrize("backend", SCHEDULES)
def test_long_lists_of_tiles_of_all_lengths(backend):
  # 30 query tiles with 1 to 30 key tiles each.
  check(240, [Causal(), Dilated(9, 7)], backend, 8)


@pytest.mark.parametrize("backend", SCHEDULES)
@pytest.mark.parametrize("name", patterns.FACTORIZATIONS)
@pytest.mark.usefixtures("optimized")
def test_every_factorization(name, backend):
  (heads,) = patterns.assign(
    name, "merged", num_layers=1, num_heads=3, **SETTINGS
  )
  check(61, heads, backend, 16)


mixes = hypothesis.given(
  st.lists(st.sampled_from(catalogue.ALL), min_size=1, max_size=4),
  st.sampled_from([1, 7, 40, 89, 120]),
  st.sampled_from([0, 8, 16, 32]),
  st.sampled_from(SCHEDULES),
)


@hypothesis.settings(deadline=None, max_examples=4)
@mixes
def test_any_mix_of_heads(mix, n, tile, backend):
  check(n, mix, backend, tile)


@pytest.mark.soak
@hypothesis.settings(deadline=None, max_examples=100)
@mixes
def test_many_mixes_of_heads(mix, n, tile, backend):
  check(n, mix, backend, tile)


# Rounded once each to 8 and to 11 bits of mantissa: weights, outputs, scores'
# gradients, results.
@pytest.mark.parametrize(
  "dtype, tolerance", [(jnp.bfloat16, 0.02), (jnp.float16, 0.0025)]
)
@pytest.mark.parametrize("backend", ["dense", *SCHEDULES])
@pytest.mark.usefixtures("optimized")
def test_half_precision_stays_close(backend, dtype, tolerance):
  heads = Local(12) | Strided(12), BigBird(8), catalogue.Fifths()
  check(96, heads, backend, 16, dtype, tolerance)


@pytest.mark.parametrize("backend", ["dense", *SCHEDULES])
def test_row_without_keys_gives_zero(backend):
  q, k, v, dout, _ = arrays(40, 2)
  pattern = catalogue.Fifths()
  empty = ~pattern.matrix(40).any(1)
  assert empty.any() and not empty.all()

  def attend(q, k, v):
    return attention.attend(
      q, k, v, pattern, backend=backend, tile=16, return_lse=True
    )

  (out, lse), vjp = jax.vjp(attend, q, k, v)
  assert (np.asarray(out)[:, empty] == 0).all()
  assert (np.asarray(lse)[:, empty] == -np.inf).all()
  assert np.isfinite(np.asarray(lse)[:, ~empty]).all()
  dq, dk, dv = vjp((dout, jnp.zeros_like(lse)))
  assert (np.asarray(dq)[:, empty] == 0).all()
  assert all(np.isfinite(x).all() for x in (dq, dk, dv))


@pytest.mark.parametrize("backend", ["dense", *SCHEDULES])
def test_pattern_without_pairs_gives_zeros(backend):
  results = run(*arrays(40, 1), (Causal() - Causal(),), backend, 16)
  assert all((np.asarray(x) == 0).all() for x in results)


def test_splash_attention_agrees():
  """An implementation of others, TPU kernels run by their interpreter."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
    splash_attention_mask as mask_lib,
  )

  n, heads = 256, catalogue.CAUSAL
  q, k, v, dout, _ = arrays(n, len(heads), k=64, e=64, batch=1)
  matrices = [np.array(pattern.matrix(n)) for pattern in heads]
  # It gives rows without keys an average of all values; ours are 0.
  rows = np.stack([m.any(1) for m in matrices], 1)[None, :, :, None]
  for matrix in matrices:
    matrix[~matrix.any(1), 0] = True
  sides = "block_q block_kv block_q_dkv block_kv_dkv block_q_dq block_kv_dq"
  sizes = kernel.BlockSizes(
    **dict.fromkeys(sides.split(), 128),
    block_kv_compute=128,
    block_kv_dkv_compute=128,
  )
  splash = kernel.make_splash_mha(
    mask_lib.MultiHeadMask([mask_lib.NumpyMask(m) for m in matrices]),
    head_shards=1,
    q_seq_shards=1,
    block_sizes=sizes,
    interpret=True,
  )

  def theirs(q, k, v):
    q, k, v = (x[0].swapaxes(0, 1) for x in (q / 8, k, v))
    return splash(q, k, v).swapaxes(0, 1)[None]

  def ours(backend, q, k, v):
    return attention.attend(q, k, v, heads, backend=backend, tile=64)

  @functools.partial(jax.jit, static_argnums=0)
  def compute(attend):
    def masked(*inputs):
      return jnp.where(rows, attend(*inputs), 0)

    out, vjp = jax.vjp(masked, q, k, v)
    return out, *vjp(dout)

  expected = compute(theirs)
  for backend in SCHEDULES:
    found = compute(functools.partial(ours, backend))
    for x, y in zip(found, expected, strict=True):
      np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("platform", ["cuda", "tpu", "rocm"])
def test_parallel_schedule_lowers_for_accelerators(platform):
  heads = Local(96) | Strided(96), Block(128) | Summary(128, 32), BigBird(64)

  def step(q, k, v, dout):
    attend = functools.partial(
      attention.attend, patterns=heads, backend="blocked_parallel"
    )
    return jax.vjp(attend, q, k, v)[1](dout)

  x = jax.ShapeDtypeStruct((1, 3072, 3, 64), jnp.bfloat16)
  lowered = (
    jax.jit(step).trace(x, x, x, x).lower(lowering_platforms=(platform,))
  )
  assert "dot_general" in lowered.as_text()


def test_schedule_follows_the_device(monkeypatch):
  used = []
  monkeypatch.setattr(blocked, "_attend", lambda *args: used.append(args[-1]))
  for device in ("cpu", "gpu", "tpu"):
    monkeypatch.setattr(jax, "default_backend", lambda device=device: device)
    blocked.attend(*arrays(8, 1)[:3], (Causal(),))
  assert used == ["sequential", "parallel", "parallel"]


def test_lanes_visit_every_tile_once_and_are_balanced():
  layout = (Block(128) | Summary(128, 32)).parts()[1].layout(12288, 128)
  lanes = blocked.parallel.plan(
    Summary(128, 32) - Block(128), 12288, 128
  ).by_query
  real = lanes.major >= 0
  visits = sorted(zip(lanes.major[real], lanes.minor[real], strict=True))
  assert visits == list(zip(layout.rows, layout.cols, strict=True))
  # Idle visits: what the longest list leaves of the last lanes.
  assert real.mean() > 0.9
  longest = np.bincount(layout.rows).max()
  assert len(lanes.major) < 2 * longest


@pytest.mark.parametrize(
  "pattern, n, tile",
  [
    (Local(128), 12288, 64),
    (Block(128), 12288, 128),
    (Strided(128), 12288, 96),  # columns of 96
    (BigBird(64), 12288, 64),
  ],
  ids=str,
)
def test_tile_is_chosen_from_the_pattern(pattern, n, tile):
  plan = sequential.plan(pattern, n)
  assert plan.tile == tile and plan.is_single


def test_merge_of_rows_without_keys_has_no_nan():
  nothing = jnp.zeros((1, 2, 1, 3)), jnp.full((1, 2, 1), -jnp.inf)
  something = jnp.ones((1, 2, 1, 3)), jnp.zeros((1, 2, 1))
  out, lse = blocked.merge(nothing, nothing)
  assert (out == 0).all() and (lse == -jnp.inf).all()
  for pair in ((nothing, something), (something, nothing)):
    out, lse = blocked.merge(*pair)
    assert (out == 1).all() and (lse == 0).all()


@pytest.mark.parametrize("backend", SCHEDULES)
@pytest.mark.parametrize(
  "heads",
  [
    pytest.param(heads, marks=pytest.mark.soak if i else ())
    for i, heads in enumerate(chunks(catalogue.ALL, 10))
  ],
  ids=len,
)
def test_gradient_is_exactly_zero_off_the_pattern(heads, backend):
  n = 35
  q, k, v, *_ = arrays(n, len(heads), k=2, e=2, batch=1)

  @jax.jit
  def jacobians(q, k, v):
    def attend(q, k, v):
      # Summed over heads, which do not meet: one column of the Jacobian.
      out = attention.attend(q, k, v, heads, backend=backend, tile=16)
      return out.sum(2)

    return jax.jacrev(attend, argnums=(0, 1, 2))(q, k, v)

  # [out position, in position, head]: the largest of all widths.
  dq, dk, dv = (np.abs(x).max((0, 2, 3, 6)) for x in jacobians(q, k, v))
  for head, pattern in enumerate(heads):
    matrix = pattern.matrix(n)
    assert (dv[~matrix, head] == 0).all() and (dk[~matrix, head] == 0).all()
    assert (dq[~np.eye(n, dtype=bool), head] == 0).all()
    assert (dv[matrix, head] > 0).all()


@pytest.mark.parametrize(
  "pattern, limit",
  [
    (Local(128), 100),
    (Block(128), 100),
    (Strided(128), 150),
    (Summary(128, 32), 150),
    (Local(128) | Strided(128), 150),
    (Block(128) | Summary(128, 32), 150),
    (BigBird(64), 100),
    (Dilated(128, 16), 150),
  ],
  ids=str,
)
@pytest.mark.usefixtures("optimized")
def test_memory_of_forward_and_backward_is_linear(pattern, limit):
  def step(q, k, v, dout):
    attend = functools.partial(
      attention.attend, patterns=pattern, backend="blocked_sequential"
    )
    return jax.vjp(attend, q, k, v)[1](dout)

  x = jax.ShapeDtypeStruct((1, 12288, 4, 64), jnp.float32)
  compiled = jax.jit(step).lower(x, x, x, x).compile()
  assert compiled.memory_analysis().temp_size_in_bytes <= limit * 2**20
