"""The backend that calls cuDNN, with XLA's implementation in its place."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws

from sparse_transformer.attention import attend, contract, platforms, registry
from sparse_transformer.attention.backends.cudnn import Cudnn
from sparse_transformer.patterns import Causal, Full, Strided

BACKEND = "by_xla"
SIX = 2 * (Causal(), Full(), Causal())
SAVE = jax.checkpoint_policies.save_only_these_names(*contract.SAVED_NAMES)


@pytest.fixture(scope="module", autouse=True)
def _registered():
  registry.register(BACKEND, Cudnn("xla"))
  yield
  registry.unregister(BACKEND)


@pytest.mark.parametrize(
  "heads, n, widths, dtype, options, wrap",
  [
    (SIX, 60, (8, 12), jnp.float32, laws.PLAIN, lambda f: f),
    (SIX, 1, (8, 8), jnp.float32, laws.PLAIN, lambda f: f),
    (SIX, 53, (5, 20), jnp.float32, laws.Options(group=2), jax.checkpoint),
    (SIX, 53, (8, 8), jnp.float32, laws.PLAIN, "save"),
    (SIX, 64, (24, 8), jnp.bfloat16, laws.Options(6, scale=-0.7), lambda f: f),
  ],
)
def test_values_and_gradients(heads, n, widths, dtype, options, wrap):
  sizes = n, len(heads), *widths, 2, dtype
  *inputs, dlse = laws.random_inputs(*sizes, group=options.group)
  settings = dict(
    patterns=tuple(heads),
    scale=options.scale,
    backend=BACKEND,
  )
  if wrap == "save":
    wrap = functools.partial(jax.checkpoint, policy=SAVE)

  @jax.jit
  def run(q, k, v, dout):
    attention = wrap(functools.partial(attend, **settings))
    out, vjp = jax.vjp(attention, q, k, v)
    return out, *vjp(dout)

  out, *grads = run(*inputs)
  expected = laws.reference(*inputs, 0 * dlse, heads, options)

  assert out.dtype == dtype
  tolerance = 2e-5 if dtype == jnp.float32 else 0.02
  laws.assert_close((out, expected[1], *grads), expected, tolerance)


@pytest.mark.parametrize(
  "changes, words",
  [
    (dict(), "^cudnn$"),
    (dict(platform="tpu"), "^mosaic$"),
    (dict(patterns=(Strided(96), Causal())), r"^triton; .*\(96\) is not dense"),
    (dict(length=517), r"^triton; not cudnn: JAX has gradients of Full\(\)"),
    (dict(batch=2**16), "more than 65535 sequences"),
    (dict(patterns=(Causal(),), length=517), "^cudnn$"),
    (
      dict(qk_width=8, segments=True),
      "^batched; .*; not triton: widths of heads .*",
    ),
    (dict(tile=48), "^batched; "),
    (dict(value_dtype="float32"), "^batched; .*triton: it does"),
    (dict(segments=True, sinks=True), "not support segments, sinks"),
    (dict(tile=32), "^triton; not cudnn: its tiles cannot be chosen"),
    (dict(dtype="float32"), "its dtypes are bfloat16, float16, got float32"),
    (dict(value_width=256), "^batched; .* at most 128, got 256"),
    (dict(capability=7.5), "^batched; .*capability 8.0 or later"),
  ],
)
def test_choice_on_gpus(changes, words):
  """cuDNN where it can run, or the reason and the next backend."""
  fields = dict(
    patterns=(Causal(), Full()),
    length=3072,
    batch=4,
    qk_width=64,
    value_width=128,
    dtype="bfloat16",
    platform="cuda",
    capability=8.9,
  )
  fields |= changes
  capability = fields.pop("capability")
  with platforms.targeting(fields["platform"], capability):
    choice = registry.explain_choice("auto", laws.request_for(**fields))

  assert re.search(words, choice), choice


@pytest.mark.parametrize("name", ["segments", "sinks", "lse"])
def test_calls_that_need_more_are_refused(name):
  q, k, v, *_ = laws.random_inputs(20, 1)
  settings = dict(
    segments=dict(segments_BL=np.zeros((2, 20), int)),
    sinks=dict(sinks_H=np.zeros(1)),
  ).get(name, dict(return_lse=True))
  with pytest.raises(contract.Unsupported, match=f"does not support {name}"):
    attend(q, k, v, Causal(), backend=BACKEND, **settings)
