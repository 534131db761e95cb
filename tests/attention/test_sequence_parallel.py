"""Laws of positions that are split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import backend_laws as laws, catalogue, runs
from helpers.cases import soak
from helpers.errors import refused
from jax.sharding import (
  AbstractMesh,
  AxisType,
  NamedSharding,
  PartitionSpec as P,
)

from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.backends.mosaic import Mosaic
from sparse_transformer.attention.backends.triton import Triton
from sparse_transformer.attention.backends.xla import Xla
from sparse_transformer.attention.contract import Backend, Split
from sparse_transformer.attention.sequence_parallel import (
  Exchange,
  OverHeads,
  plan_device,
  slice_part,
)
from sparse_transformer.patterns import (
  LSH,
  Block,
  Causal,
  Local,
  Strided,
  Summary,
  TopBlocks,
)
from sparse_transformer.targets import hlo

DEVICES = 2, 4, 8
EXACT = Local(16), Block(32), Strided(16)
AT_RUN_TIME = Local(5) | LSH(8, 4, 2) | TopBlocks(8, 2)
SPLIT = P(None, "x")


# What devices have and compute, without compiling anything.


def brought(route):
  """The positions that a device has at each place, as messages bring them."""
  num_devices = len(route.positions)
  mine = np.arange(num_devices * route.own).reshape(num_devices, -1)
  sent = np.where(
    route.sent < route.own,
    np.take_along_axis(mine, route.sent.clip(max=route.own - 1), axis=1),
    -1,
  )
  if route.shifts is None:
    came = sent.reshape(num_devices, num_devices, -1).swapaxes(0, 1)
    came = came.reshape(num_devices, -1)
  else:
    messages = np.split(sent, np.cumsum(route.sizes)[:-1], axis=1)
    came = map(functools.partial(np.roll, axis=0), messages, route.shifts)
    came = np.concatenate([sent[:, :0], *came], 1)

  held = np.concatenate([mine, came], 1)
  return np.take_along_axis(held, route.read.clip(0), axis=1)


def pairs_of_device(part, layout):
  """How often a device computes each pair, as (queries, keys) of tiles."""
  tile = layout.tile
  q = layout.query_order.reshape(-1, tile)[layout.rows][:, :, None]
  k = layout.key_order.reshape(-1, tile)[layout.cols][:, None]
  found = part.mask(q.clip(0), k.clip(0)) & (q >= 0) & (k >= 0)
  q, k, found = np.broadcast_arrays(q, k, found)
  return q[found], k[found]


@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize(
  "n, tile",
  [
    (96, 8),
    soak(80, 4),
  ],
)
def test_each_pair_is_computed_once_from_what_devices_have(
  n, tile, num_devices
):
  for pattern in catalogue.ALL:
    count = np.zeros((n, n), int)
    for part in pattern.parts():
      slices = slice_part(part, n, tile, num_devices)
      for route in (slices.queries, slices.keys):
        is_place = route.positions >= 0
        found = brought(route)[is_place]
        assert (found == route.positions[is_place]).all(), pattern
      queries = slices.queries.positions
      assert sorted(queries[queries >= 0]) == list(range(n)), pattern
      for layout in slices.layouts:
        np.add.at(count, pairs_of_device(part, layout), 1)
    np.testing.assert_array_equal(count, pattern.matrix(n), str(pattern))


def received_by(program: jax.stages.Compiled, num_devices: int) -> int:
  """Bytes that a device receives from others in collectives of all devices.

  Sums over devices are counted as a ring computes them.
  """
  share = (num_devices - 1) / num_devices
  factors = {
    **dict.fromkeys(("all-gather", "all-to-all"), share),
    "all-reduce": 2 * share,
    "collective-permute": 1.0,
    "reduce-scatter": num_devices - 1.0,
  }
  found = hlo.profile(program.as_text()).collectives
  return round(sum(factors[kind] * size for kind, (_, size) in found.items()))


@pytest.mark.parametrize("num_devices", [4, 8, 32])
@pytest.mark.parametrize(
  "n, size, width",
  [
    (4096, 64, 16),
    (12_288, 128, 32),
  ],
)
def test_devices_receive_no_more_than_a_pattern_needs(
  n, size, width, num_devices
):
  slices = functools.partial(
    slice_part,
    n=n,
    tile=64,
    num_devices=num_devices,
  )
  block = slices(Block(size))

  assert block.queries.shifts == ()
  assert block.keys.shifts == ()
  assert block.received == 0

  local = slices(Local(size))
  assert local.queries.shifts == ()
  assert local.keys.shifts == (1,)
  assert local.received == size - 1
  assert slices(Strided(size)).received <= 2 * n / num_devices

  summary = slices(Summary(size, width))
  assert summary.queries.shifts == ()
  assert summary.keys.shifts is None
  assert summary.received <= n * width / size + 64 * num_devices


@pytest.mark.parametrize(
  "part, num_heads, arrangement",
  [
    (Causal(), 8, OverHeads),  # slices would need nearly all keys
    (Causal(), 4, Exchange),  # these heads do not divide
    (Local(64), 8, Exchange),
  ],
)
def test_devices_exchange_heads_for_positions_where_slices_need_more(
  part, num_heads, arrangement
):
  mesh = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))
  request = laws.request_for(
    (part,) * num_heads,
    4096,
    tile=64,
    split=Split(positions=("x",)),
  )
  backend = registry.BACKENDS["streamed"]
  found = []

  def plan(x):
    found.extend(plan_device(backend, request))
    return x

  split = functools.partial(
    jax.shard_map,
    in_specs=P("x"),
    out_specs=P("x"),
  )
  with jax.sharding.use_abstract_mesh(mesh):
    jax.eval_shape(split(plan), jnp.zeros(8))
  ((plan, heads),) = found

  assert heads == tuple(range(num_heads))
  assert {type(plan.queries), type(plan.keys)} == {arrangement}


# Errors.


def trace(patterns, spec=SPLIT, backend="streamed", n=64):
  """Traces attention on 4 devices."""
  types = (AxisType.Auto,) * 2
  mesh = AbstractMesh((4, 2), ("x", "y"), axis_types=types)
  run = functools.partial(
    attend,
    patterns=patterns,
    backend=backend,
    spec=spec,
  )
  inputs = n, len(patterns), 16, 16, 1, jnp.bfloat16
  arrays = jax.eval_shape(lambda: laws.random_inputs(*inputs)[:3])
  with jax.sharding.use_abstract_mesh(mesh):
    return jax.eval_shape(run, *arrays)


class Alone(Xla):
  """Runs on one device."""

  device_tables = Backend.device_tables


@pytest.mark.parametrize(
  "patterns, changes, words",
  [
    ((Causal(),), dict(spec=P(None, "z")), "with axes \\('x', 'y'\\)"),
    ((Causal(),), dict(spec=P(None, "x", None, "y")), "say which axes"),
    ((Causal(),), dict(n=66), "66 positions cannot be split over 4 devices"),
    ((Causal(),) * 3, dict(spec=P(None, None, "y")), "3 heads cannot be"),
    ((LSH(8, 4, 2),) * 2, {}, "2 heads cannot be split over 4 devices"),
    ((Local(5),), dict(backend="alone"), "cannot split positions"),
  ],
)
def test_what_cannot_be_split_is_rejected(patterns, changes, words, request):
  registry.register("alone", Alone())
  request.addfinalizer(lambda: registry.unregister("alone"))
  with refused(words):
    trace(patterns, **changes)


@pytest.mark.parametrize("kernels", [Mosaic, Triton])
@pytest.mark.parametrize(
  "pattern, spec, dtype",
  [
    (Local(5), P(), "bfloat16"),
    (Local(5) | LSH(8, 4), P(), "float32"),
    (Causal() | Strided(8, causal=False), SPLIT, "float32"),
  ],
)
def test_sums_are_not_rounded(pattern, spec, dtype, kernels, monkeypatch):
  found = []
  forward = kernels.forward

  def run(*given):
    return found.append(forward(*given)) or found[-1]

  monkeypatch.setattr(kernels, "forward", run)
  monkeypatch.setitem(registry.BACKENDS, "triton", kernels(interpret=True))
  trace((pattern,) * 8, spec, "triton")

  assert {str(out.dtype) for out, _ in found} == {dtype}


# On 8 devices.

on_eight_devices = functools.partial(runs.on_devices, 8)


def mesh_of(num_devices):
  devices = jax.devices()[:num_devices]
  types = (AxisType.Auto,)
  return jax.make_mesh((num_devices,), ("x",), types, devices=devices)


def compiled(heads, backend, tile, num_devices, arrays, gradients=True):
  """The program of (out, lse, dq, dk, dv), and its sharded arguments."""
  mesh = mesh_of(num_devices)
  split = NamedSharding(mesh, SPLIT)
  arrays = [jax.device_put(x, split) for x in arrays]

  def run(*arrays):
    settings = dict(
      backend=backend,
      tile=tile,
      spec=SPLIT,
      return_lse=True,
    )
    attention = functools.partial(attend, patterns=heads, **settings)
    if gradients:
      return laws.with_gradients(attention, *arrays)
    return attention(*arrays)

  with jax.set_mesh(mesh):
    return jax.jit(run).lower(*arrays).compile(), arrays


@pytest.mark.soak
def test_results_and_traffic_on_eight_devices():
  on_eight_devices(check_exchanges)
  on_eight_devices(check_program)


def check_exchanges():
  """`restore` is the transpose of `arrange`, of each kind of exchange."""
  n = 64
  devices = 8
  mesh = mesh_of(devices)
  found = {}
  for part in (Local(12), Strided(8), Summary(16, 4), Causal()):
    slices = slice_part(part, n, 4, devices)
    for route in (slices.queries, slices.keys):
      found[route.shifts] = route

  assert {(), (1, 2), None} <= found.keys()
  for route in found.values():
    check_transpose(mesh, Exchange(("x",), route), n)


def check_transpose(mesh, exchange, n):
  """<arrange x, y> = <x, restore y>, where places are real."""
  positions = exchange.route.positions.ravel()
  real = positions >= 0
  x, y = (
    jax.random.normal(jax.random.key(i), (1, size, 2, 3))
    for i, size in enumerate((n, positions.size))
  )
  y = jnp.where(real[:, None, None], y, jnp.inf)

  @jax.jit
  @functools.partial(
    jax.shard_map, mesh=mesh, in_specs=SPLIT, out_specs=SPLIT, check_vma=False
  )
  def both(x, y):
    return exchange.arrange(x), exchange.restore(y)

  there, back = both(x, y)
  y = jnp.where(real[:, None, None], y, 0)

  np.testing.assert_allclose((there * y).sum(), (x * back).sum(), rtol=1e-4)
  at = positions[real]
  np.testing.assert_array_equal(there[:, real], np.asarray(x)[:, at])


def check_program(backend="streamed", num_devices=4):
  """Results are those of the definition, bytes those of the routes."""
  n = 128
  tile = 16
  item = 4
  arrays = laws.random_inputs(n, len(EXACT), 8, 8, batch=1)
  program, sharded = compiled(EXACT, backend, tile, num_devices, arrays)

  laws.assert_close(program(*sharded), laws.reference(*arrays, EXACT), 1e-5)
  slices = [slice_part(part, n, tile, num_devices) for part in EXACT]
  queries = sum(x.queries.received for x in slices)
  keys = sum(x.keys.received for x in slices)
  (forward, _) = compiled(
    EXACT, backend, tile, num_devices, arrays[:3], gradients=False
  )
  expected = (queries * (8 + 8 + 1) + keys * (8 + 8)) * item

  assert received_by(forward, num_devices) == expected


def check_exact(*devices):
  """The same bits as on one device, where a tile has the same keys.

  XLA compiles loops over one or two tiles differently, with sums in another
  order, so each device has at least four.
  """
  n = 2048
  tile = 64
  heads = (Local(64), Block(64), Strided(8))
  arrays = laws.random_inputs(n, len(heads), 16, 16, batch=1)
  program, whole = compiled(heads, "streamed", tile, 1, arrays)
  expected = program(*whole)
  for num_devices in devices:
    program, split = compiled(heads, "streamed", tile, int(num_devices), arrays)
    for name, x, y in zip(
      laws.NAMES[:5], program(*split), expected, strict=True
    ):
      np.testing.assert_array_equal(x, y, name)


@pytest.mark.soak
@pytest.mark.usefixtures("optimized")
def test_some_patterns_have_the_same_bits_as_on_one_device():
  on_eight_devices(check_exact, *map(str, DEVICES))


@pytest.mark.soak
@pytest.mark.parametrize("num_devices", DEVICES)
@pytest.mark.parametrize(
  "backend", [*laws.ANYWHERE, "dense", "triton", "mosaic"]
)
def test_every_pattern_agrees_with_its_definition(backend, num_devices):
  on_eight_devices(check_catalogue, backend, str(num_devices))


def check_catalogue(backend, num_devices):
  tile = 16
  width = 8
  num_devices = int(num_devices)
  if backend in ("triton", "mosaic"):
    kernels = dict(
      triton=Triton,
      mosaic=Mosaic,
    )[backend]
    backend = "interpreted"
    tile = 32
    width = 16
    registry.register(backend, kernels(interpret=True))

  settings = backend, tile, num_devices
  for first in range(0, len(catalogue.ALL), 6):
    heads = catalogue.ALL[first : first + 6]
    arrays = laws.random_inputs(104, len(heads), width, width, batch=1)
    program, split = compiled(heads, *settings, arrays)
    laws.assert_close(program(*split), laws.reference(*arrays, heads), 1e-5)

  heads = (AT_RUN_TIME,) * 8
  arrays = laws.random_inputs(64, len(heads), width, width, batch=1)
  program, split = compiled(heads, *settings, arrays)
  dense, whole = compiled(heads, "dense", tile, 1, arrays)

  laws.assert_close(program(*split), dense(*whole), 1e-5)


@pytest.mark.soak
def test_heads_over_devices_and_positions_over_two_axes():
  on_eight_devices(check_two_axes)


def check_two_axes():
  """Within `jax.shard_map` and outside, over one axis and over two."""
  n = 128
  heads = (Causal(), Strided(8)) * 4
  arrays = laws.random_inputs(n, len(heads), 8, 8, batch=2)
  types = (AxisType.Auto,) * 3
  mesh = jax.make_mesh((2, 2, 2), ("b", "x", "y"), types)
  expected = laws.reference(*arrays, heads)
  for spec in (P("b", "x", "y"), P("b", ("x", "y")), P(None, "y")):

    def run(*arrays, spec=spec, within=False):
      attention = functools.partial(
        attend,
        patterns=heads,
        tile=16,
        spec=spec,
        return_lse=True,
      )
      if within:
        attention = jax.shard_map(
          attention,
          in_specs=spec,
          out_specs=spec,
          check_vma=False,
        )

      return laws.with_gradients(attention, *arrays)

    with jax.set_mesh(mesh):
      laws.assert_close(jax.jit(run)(*arrays), expected, 1e-5)
      if "y" not in spec[2:]:
        within = functools.partial(run, within=True)
        laws.assert_close(jax.jit(within)(*arrays), expected, 1e-5)
