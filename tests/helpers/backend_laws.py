"""What tests of backends share: cases, inputs, results and their comparison.

The laws are in tests/attention/test_backends.py, for every registered
backend; the reference is helpers/reference_attention.py.
"""

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers.reference_attention import attention as reference_attention

from sparse_transformer.attention import (
  Request,
  attend,
  contract,
  platforms,
  registry,
  vjp,
)
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  RandomBlocks,
  Routing,
  Strided,
  Summary,
)

NAMES = "out", "lse", "dq", "dk", "dv", "dsinks"


def request_for(patterns, length, **changes: Any) -> Request:
  """What a backend is asked: heads of 16 in float32, with changes."""
  fields = dict(
    batch=1,
    num_key_heads=len(patterns),
    qk_width=16,
    value_width=16,
    dtype="float32",
  )
  fields |= changes
  fields.setdefault("value_dtype", fields["dtype"])
  return Request(patterns=patterns, length=length, **fields)


@dataclasses.dataclass(frozen=True)
class Options:
  """Arguments of `attend` besides queries, keys, values and patterns."""

  group: int = 1  # query heads of a key head
  packed: bool = False  # whether sequences have several segments
  scale: float | None = None
  softcap: float = 0.0
  has_sinks: bool = False

  def segments(self, batch, n):
    """Integers [batch, n]; the last document has the number of the first."""
    if not self.packed:
      return None
    positions = np.arange(n)
    documents = []
    for i in range(batch):
      ends = [n // 4, n // 2 + 1, n - n // 8 - i]
      documents.append((positions[:, None] >= ends).sum(1))
    return np.stack(documents) % 3 * 5 - 4

  def settings(self, batch, n):
    """The arguments that are known before tracing."""
    return dict(
      segments_BL=self.segments(batch, n),
      scale=self.scale,
      softcap=self.softcap,
    )

  def sinks(self, heads):
    """A number for each head, or None."""
    return np.linspace(-1, 2, heads, dtype="f4") if self.has_sinks else None


PLAIN = Options()
# Options with which laws are checked; groups divide 6 heads.
OPTIONS = (
  PLAIN,
  Options(group=2, packed=True),
  Options(group=6, scale=0.5, has_sinks=True),
  Options(group=3, packed=True, softcap=1.5, has_sinks=True),
)
# Patterns of heads: parts in several orders, queries without keys, and parts
# whose queries are in the same order.
TWO_SLOTS = Local(12) | Strided(12), Strided(5)
WITHOUT_KEYS = RandomBlocks(4, 2) - Local(9), Causal() - Causal()
SHARED_ORDER = (
  Block(32) | Summary(32, 8),
  Block(32) | Summary(32, 8, shift=1),
  Local(17),
)
# The backends that run every case on every platform.
ANYWHERE = tuple(
  name
  for name, backend in registry.BACKENDS.items()
  if backend.unsupported(request_for((Local(3),), 9, qk_width=5)) is None
)


def settings_for(backend):
  """For parts that follow the content: "batched" runs them as on accelerators.

  Other backends run them as on this platform.
  """
  return platforms.targeting("tpu" if backend == "batched" else "")


# Inputs.


def random_inputs(
  n, heads, k=8, e=12, batch=2, dtype=jnp.float32, seed=0, group=1
):
  """q, k, v and the cotangents of out and lse."""
  random = np.random.default_rng(n + 1000 * seed)  # compiles nothing

  def draw(*shape, dtype=dtype):
    return jnp.asarray(random.standard_normal((batch, n, *shape)), dtype)

  return (
    draw(heads, k),
    draw(heads // group, k),
    draw(heads // group, e),
    draw(heads, e),
    draw(heads, dtype=jnp.promote_types(dtype, jnp.float32)),
  )


def directions_of(heads, width=8):
  """What `attend` does not draw itself: centroids of each head."""
  directions = {}
  for pattern in heads:
    for content in pattern.contents():
      if isinstance(content, Routing):
        shape = len(heads), content.clusters, width
        directions[content] = jax.random.normal(jax.random.key(7), shape)

  return directions


# Results.


def reference(q, k, v, dout, dlse, heads, options=PLAIN):
  """(out, lse, dq, dk, dv) in float64, and with sinks their gradients."""
  mask = np.stack([pattern.matrix(q.shape[1]) for pattern in heads])
  return reference_of_mask(mask, q, k, v, dout, dlse, options)


def reference_of_mask(mask, q, k, v, dout, dlse, options=PLAIN):
  """The same, over the pairs of a mask [..., H, n, n]."""
  batch, n, num_heads, _ = q.shape
  if options.packed:
    segments = options.segments(batch, n)[:, None]
    mask = mask & (segments[..., None] == segments[..., None, :])
  results = reference_attention(
    q,
    k,
    v,
    dout,
    dlse,
    weights=mask,
    scale=options.scale,
    softcap=options.softcap,
    sinks=options.sinks(num_heads),
  )
  return results[: 6 if options.has_sinks else 5]


def with_gradients(attention, q, k, v, dout, dlse, *more):
  """(out, lse, dq, dk, dv, ...) of a function; lse without keys is 0."""

  def finite(*inputs):
    out, lse = attention(*inputs)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)

  results, pullback = jax.vjp(finite, q, k, v, *more)
  return *results, *pullback((dout, dlse))


@functools.partial(
  jax.jit,
  static_argnames=("heads", "backend", "tile", "options", "unoptimized"),
)
def run(
  q, k, v, dout, dlse, heads, backend, tile, options=PLAIN, unoptimized=False
):
  """The results of `attend`."""
  del unoptimized  # JAX does not recompile when the setting changes
  settings = options.settings(*q.shape[:2])

  def attention(q, k, v, sinks=None):
    return attend(
      q,
      k,
      v,
      heads,
      backend=backend,
      tile=tile,
      return_lse=True,
      sinks_H=sinks,
      **settings,
    )

  sinks = [options.sinks(len(heads))] if options.has_sinks else []
  return with_gradients(attention, q, k, v, dout, dlse, *sinks)


def assert_close(found, expected, tolerance=2e-5):
  """Compares results by the largest number of each."""
  names = NAMES[: len(expected)]
  for name, x, y in zip(names, found, expected, strict=True):
    error = np.abs(np.asarray(x, np.float64) - y).max()
    allowed = tolerance * max(np.abs(y).max(), 1e-6)
    # A sink's gradient sums terms that cancel: it was 1/73 of their sizes' sum.
    assert error <= (4 if name == "dsinks" else 1) * allowed, (name, error)
    # Scores are products in float32, whatever the dtype.
    assert name != "lse" or error <= 1e-4, error


# Plans.


def plans_of(name, heads, n, tile):
  """[(plan, heads)] of a backend."""
  request = request_for(heads, n, batch=2, tile=tile)
  return registry.BACKENDS[name].plans(request)


def run_plans(name, plans, q, k, v, dout, dlse):
  """(out, lse, dq, dk, dv) over given plans [(plan, heads)]."""
  backend = registry.BACKENDS[name]
  everyone = tuple(range(q.shape[2]))
  work = [(backend, plan, heads or everyone) for plan, heads in plans]
  inputs = contract.Queries(q), contract.Keys(k, v)
  out, lse = vjp.forward(work, *inputs)
  out = out.astype(v.dtype)  # and gradients, as `attend` rounds them
  dq, dk, dv, *_ = vjp.backward(work, *inputs, None, out, lse, dout, dlse)
  return (
    out,
    jnp.where(jnp.isfinite(lse), lse, 0),
    dq.astype(q.dtype),
    dk.astype(k.dtype),
    dv.astype(v.dtype),
  )


# Mutations.


def mutant(change, module, *used):
  """A module with a text replaced in its source, or in that of others it uses.

  The text must be there once. What changes is marked as by `git diff
  --word-diff`.
  """
  old = re.sub(r"(?s)\{\+.*?\+\}|\[-|-\]", "", change)
  new = re.sub(r"(?s)\[-.*?-\]|\{\+|\+\}", "", change)
  mutants = {}
  count = 0
  for each in (module, *used):
    source = each.__loader__.get_source(each.__name__)
    count += source.count(old)
    name = each.__name__.rpartition(".")[2]
    mutants[name] = types.ModuleType("mutant")
    exec(source.replace(old, new), mutants[name].__dict__)

  assert count == 1, old

  first, *others = mutants.items()
  first[1].__dict__.update(others)
  return first[1]
