"""Laws of executors, which the tests check for every registered one.

The reference is float64 NumPy, written out from the definition of a pattern.
"""

import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
from helpers import catalogue

from sparse_transformer.attention import (
  attend,
  contract,
  platforms,
  registry,
  vjp,
)
from sparse_transformer.attention.contract import Case, make_case
from sparse_transformer.patterns import (
  AdaptiveSpan,
  Causal,
  Local,
  Pattern,
  RandomBlocks,
  Routing,
  Strided,
)

NAMES = "out lse dq dk dv".split()


@dataclasses.dataclass(frozen=True)
class Options:
  """Arguments of `attend` besides queries, keys, values and patterns."""

  group: int = 1  # query heads of a key head
  packed: bool = False  # whether sequences have several segments
  scale: float | None = None
  softcap: float = 0.0
  sinks: bool = False

  def segments(self, batch, n):
    """Integers [batch, n]; the last document has the number of the first."""
    if not self.packed:
      return None
    ends = [[n // 4, n // 2 + 1, n - n // 8 - i] for i in range(batch)]
    at = np.arange(n)
    return np.stack([(at[:, None] >= x).sum(1) % 3 * 5 - 4 for x in ends])

  def given(self, batch, n):
    """The arguments that are known before tracing."""
    return dict(
      segments_BL=self.segments(batch, n),
      scale=self.scale,
      softcap=self.softcap,
    )

  def arrays(self, heads):
    """Those that have gradients."""
    return [np.linspace(-1, 2, heads, dtype=np.float32)] * self.sinks


PLAIN = Options()
# Options with which laws are checked; groups divide 6 heads.
OPTIONS = (
  PLAIN,
  Options(group=2, packed=True),
  Options(group=6, scale=0.5, sinks=True),
  Options(group=3, packed=True, softcap=1.5, sinks=True),
)
# Patterns of heads: parts in several orders, and queries without keys.
TWO_SLOTS = Local(12) | Strided(12), Strided(5)
WITHOUT_KEYS = RandomBlocks(4, 2) - Local(9), Causal() - Causal()
# The executors that run every case on every platform.
ANYWHERE = tuple(
  name
  for name, executor in registry.EXECUTORS.items()
  if executor.unsupported(Case(1, 9, 1, 5, 7, "float32")) is None
)


def settings_for(backend):
  """For parts that follow the content: "batched" runs them as on accelerators.

  Other backends run them as on this platform.
  """
  return platforms.targeting("tpu" if backend == "batched" else "")


def reference(q, k, v, dout, dlse, heads, options=PLAIN):
  """(out, lse, dq, dk, dv) in float64; lse of rows without keys is 0.

  With sinks, also their gradients.
  """
  mask = np.stack([pattern.matrix(q.shape[1]) for pattern in heads])
  return reference_of_mask(mask, q, k, v, dout, dlse, options=options)


def reference_of_mask(
  mask, q, k, v, dout, dlse, bias=0, known=None, options=PLAIN
):
  """The same, over the pairs of a mask [..., H, n, n], with biased scores.

  `known` are (out, lse) if these are not all the pairs that they depend on.
  """
  batch, n, num_heads, _ = q.shape
  k, v = (np.repeat(np.asarray(x), options.group, 2) for x in (k, v))
  if options.packed:
    segments = options.segments(batch, n)[:, None]
    mask = mask & (segments[..., None] == segments[..., None, :])
  q, k, v, dout, dlse, *known = (
    np.asarray(x).astype(np.float64).swapaxes(1, 2)
    for x in (q, k, v, dout, dlse, *(known or ()))
  )
  scale = options.scale
  if scale is None:
    scale = 1 / np.sqrt(q.shape[3])
  s, slope = q @ k.swapaxes(2, 3) * scale, 1
  if options.softcap:
    s = options.softcap * np.tanh(s / options.softcap)
    slope = 1 - (s / options.softcap) ** 2
  s = np.where(mask, s + bias, -np.inf)
  sinks = np.full((num_heads, 1, 1), -np.inf)
  for x in options.arrays(num_heads):
    sinks = x.astype(np.float64)[:, None, None]
  empty = ~mask.any(-1, keepdims=True) & np.isneginf(sinks)
  top = np.maximum(s.max(-1, keepdims=True), sinks)
  top = np.where(empty, 0, top)
  total = np.exp(s - top).sum(-1, keepdims=True) + np.exp(sinks - top)
  lse = np.log(total + empty) + top
  p = np.exp(s - (known[1][..., None] if known else lse))
  out = known[0] if known else p @ v
  dp = dout @ v.swapaxes(2, 3)
  of_rows = dlse[..., None] - (dout * out).sum(-1, keepdims=True)
  ds = p * (dp + of_rows) * slope
  dk, dv = ds.swapaxes(2, 3) @ q * scale, p.swapaxes(2, 3) @ dout
  dk, dv = (
    x.reshape(batch, -1, options.group, *x.shape[2:]).sum(2) for x in (dk, dv)
  )
  dsinks = (np.exp(sinks - lse) * of_rows).sum((0, 2, 3))
  results = [out, lse[..., 0], ds @ k * scale, dk, dv]
  results = [x.swapaxes(1, 2) for x in results]
  return results + [dsinks] * options.sinks


def random_inputs(
  n, heads, k=8, e=12, batch=2, dtype=jnp.float32, seed=0, group=1
):
  """q, k, v and the cotangents of out and lse."""
  few, wide = heads // group, jnp.promote_types(dtype, jnp.float32)
  shapes = (heads, k), (few, k), (few, e), (heads, e), (heads,)
  random = np.random.default_rng(n + 1000 * seed)  # compiles nothing
  *arrays, dlse = (random.standard_normal((batch, n, *x)) for x in shapes)
  return *(jnp.asarray(x, dtype) for x in arrays), jnp.asarray(dlse, wide)


def directions_of(heads, width=8):
  """What `attend` does not draw itself: centroids and spans of each head."""
  found = {}
  for content in (c for pattern in heads for c in pattern.contents()):
    if isinstance(content, AdaptiveSpan):
      found[content] = jnp.linspace(0.0, content.max, len(heads))
    elif isinstance(content, Routing):
      shape = len(heads), content.clusters, width
      found[content] = jax.random.normal(jax.random.key(7), shape)
  return found


def with_gradients(attention, q, k, v, dout, dlse, *more):
  """(out, lse, dq, dk, dv, ...) of a function; lse without keys is 0."""

  def finite(*inputs):
    out, lse = attention(*inputs)
    return out, jnp.where(jnp.isfinite(lse), lse, 0)

  result, vjp = jax.vjp(finite, q, k, v, *more)
  return *result, *vjp((dout, dlse))


@functools.partial(jax.jit, static_argnums=(5, 6, 7, 8, 9))
def run(
  q, k, v, dout, dlse, heads, backend, tile, unoptimized=False, options=PLAIN
):
  del unoptimized  # JAX does not recompile when the setting changes
  settings = dict(backend=backend, tile=tile, return_lse=True)
  settings |= options.given(*q.shape[:2])

  def attention(q, k, v, sinks=None):
    return attend(q, k, v, heads, sinks_H=sinks, **settings)

  more = options.arrays(len(heads))
  return with_gradients(attention, q, k, v, dout, dlse, *more)


def assert_close(found, expected, tolerance=2e-5):
  names = (*NAMES, "dsinks")[: len(expected)]
  for name, x, y in zip(names, found, expected, strict=True):
    error = np.abs(np.asarray(x, np.float64) - y).max()
    allowed = tolerance * max(np.abs(y).max(), 1e-6)
    # A sink's gradient sums terms that cancel: it was 1/73 of their sizes' sum.
    assert error <= (4 if name == "dsinks" else 1) * allowed, (name, error)
    # Scores are products in float32, whatever the dtype.
    assert name != "lse" or error <= 1e-4, error


def agrees_with_the_reference(
  backend, heads, n, tile=0, dtype=jnp.float32, tolerance=2e-5, options=PLAIN
):
  inputs = random_inputs(n, len(heads), dtype=dtype, group=options.group)
  unoptimized = jax.config.read("jax_disable_most_optimizations")
  found = run(*inputs, tuple(heads), backend, tile, unoptimized, options)
  assert found[0].dtype == dtype
  assert found[1].dtype == jnp.promote_types(dtype, jnp.float32)
  assert_close(found, reference(*inputs, heads, options), tolerance)


def row_without_keys_gives_zero(backend):
  pattern, n = catalogue.Fifths(), 40
  q, k, v, dout, _ = random_inputs(n, 2)
  empty = ~pattern.matrix(n).any(1)
  assert empty.any() and not empty.all()
  settings = dict(backend=backend, tile=16, return_lse=True)
  attention = jax.jit(functools.partial(attend, patterns=pattern, **settings))
  (out, lse), vjp = jax.vjp(attention, q, k, v)
  assert (np.asarray(out)[:, empty] == 0).all()
  assert (np.asarray(lse)[:, empty] == -np.inf).all()
  grads = vjp((dout, jnp.ones_like(lse)))
  assert all(np.isfinite(x).all() for x in grads)
  assert (np.asarray(grads[0])[:, empty] == 0).all()


def pattern_without_pairs_gives_zeros(backend):
  inputs = random_inputs(40, 1)
  results = run(*inputs, (Causal() - Causal(),), backend, 16)
  assert all((np.asarray(x) == 0).all() for x in results)


def gradient_is_zero_outside_the_pattern(backend, heads):
  n = 35
  q, k, v, *_ = random_inputs(n, len(heads), k=2, e=2, batch=1)

  @jax.jit
  def jacobians(q, k, v):
    def summed(q, k, v):
      # Summed over heads, which do not interact: one column of the Jacobian.
      return attend(q, k, v, heads, backend=backend, tile=16).sum(2)

    return jax.jacrev(summed, argnums=(0, 1, 2))(q, k, v)

  # [output position, input position, head]: the largest of all widths.
  dq, dk, dv = (np.abs(x).max((0, 2, 3, 6)) for x in jacobians(q, k, v))
  for head, pattern in enumerate(heads):
    matrix = pattern.matrix(n)
    assert (dv[~matrix, head] == 0).all() and (dk[~matrix, head] == 0).all()
    assert (dq[~np.eye(n, dtype=bool), head] == 0).all()
    assert (dv[matrix, head] > 0).all()


def tables_can_be_arguments_of_jit(backend):
  pattern, n = Local(9) | Strided(7), 50
  inputs = random_inputs(n, 3)
  plans, heads = zip(*plans_of(backend, (pattern,) * 3, n, 16), strict=True)

  @jax.jit
  def planned(plans, *inputs):
    for table in jax.tree.leaves(plans):
      assert isinstance(table, jax.core.Tracer)
    return run_plans(backend, zip(plans, heads, strict=True), *inputs)

  assert_close(planned(plans, *inputs), reference(*inputs, (pattern,) * 3))


def run_plans(backend, plans, q, k, v, dout, dlse):
  """(out, lse, dq, dk, dv) over given plans [(plan, heads)]."""
  executor = registry.EXECUTORS[backend]
  work = [(executor, plan, heads) for plan, heads in plans]
  inputs = contract.Queries(q), contract.Keys(k, v), None
  out, lse = vjp.forward(work, *inputs)
  out = out.astype(v.dtype)  # and gradients, as `attend` rounds them
  grads = vjp.backward(work, *inputs, out, lse, dout, dlse)[:3]
  grads = (g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True))
  return out, jnp.where(jnp.isfinite(lse), lse, 0), *grads


def plans_of(backend, heads, n, tile):
  """[(plan, heads)] of an executor."""
  q, _, v, *_ = jax.eval_shape(lambda: random_inputs(n, len(heads)))
  return registry.EXECUTORS[backend].plans(heads, make_case(q, v, tile=tile))


@dataclasses.dataclass(frozen=True)
class Queries(Pattern):
  """All pairs whose query is in [first, last)."""

  first: int
  last: int

  def mask(self, q, k):
    return (q >= self.first) & (q < self.last) & (k >= 0)


def plans_of_halves(backend, n, num_heads):
  """(stacked plans, patterns) of two devices with half of the queries each."""
  everywhere = Strided(3, causal=False)
  halves = [Queries(i, i + n // 2) & everywhere for i in (0, n // 2)]
  plans = []
  for half in halves:
    ((plan, _),) = plans_of(backend, (half,) * num_heads, n, 8)
    # The tables say which queries; the mask may then be the same for both.
    plans.append(dataclasses.replace(plan, pattern=everywhere))
  return jax.tree.map(lambda *x: np.stack(x), *plans), halves


def tables_can_be_indexed_by_a_traced_number(backend):
  n = 64
  plans, halves = plans_of_halves(backend, n, 2)

  @jax.jit
  def indexed(i, *inputs):
    plan = jax.tree.map(lambda table: jnp.asarray(table)[i], plans)
    return run_plans(backend, [(plan, None)], *inputs)

  inputs = random_inputs(n, 2)
  for i, half in enumerate(halves):
    assert_close(indexed(i, *inputs), reference(*inputs, (half,) * 2))


def derivatives_are_right_or_raise(backend, pattern, n=20, width=16):
  """Gradients, second derivatives both ways, and `vmap` of them."""
  q, k, v, *_ = random_inputs(n, 1, width, width, batch=1)

  def loss(scale, backend=backend):
    return (attend(scale * q, k, v, pattern, backend=backend) ** 2).sum()

  scale, gradient = jnp.float32(0.7), jax.grad(loss)
  plain = jax.grad(lambda x: loss(x, "dense"))
  first, second = values_or_none((plain, jax.jacfwd(plain)), scale)
  derivatives = {
    gradient: first,
    jax.jacrev(gradient): second,
    jax.jacfwd(gradient): second,
    lambda scale: jax.jvp(gradient, (scale,), (1.0,))[1]: second,
    lambda scale: jax.vmap(gradient)(scale[None])[0]: first,
    lambda scale: jax.vmap(jax.hessian(loss))(scale[None])[0]: second,
  }
  found = values_or_none(derivatives, scale)
  pairs = zip(found, derivatives.values(), strict=True)
  right = [pair for pair in pairs if pair[0] is not None]
  np.testing.assert_allclose(*zip(*right, strict=True), rtol=2e-3)
  return len(right)


def values_or_none(functions, x):
  """Values, from one program if no function raises; None for those that do."""
  try:
    return jax.jit(lambda x: [f(x) for f in functions])(x)
  except (NotImplementedError, TypeError, ValueError, AssertionError):
    if len(functions) == 1:
      return [None]
  return [y for f in functions for y in values_or_none([f], x)]


def mutant(change, module, *used):
  """A module with a text replaced in its source, or in that of others it uses.

  The text must be there once. What changes is marked as by `git diff
  --word-diff`.
  """
  old = re.sub(r"(?s)\{\+.*?\+\}|\[-|-\]", "", change)
  new = re.sub(r"(?s)\[-.*?-\]|\{\+|\+\}", "", change)
  found, count = {}, 0
  for each in (module, *used):
    source = each.__loader__.get_source(each.__name__)
    count += source.count(old)
    name = each.__name__.rpartition(".")[2]
    found[name] = types.ModuleType("mutant")
    exec(source.replace(old, new), found[name].__dict__)
  assert count == 1, old
  first, *others = found.items()
  first[1].__dict__.update(others)
  return first[1]
