"""The executor for Hopper GPUs: its races; the rest is in test_kernels.py."""

import dataclasses

import executor_laws as laws
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

from sparse_transformer.attention import attend, registry
from sparse_transformer.attention.contract import Case
from sparse_transformer.attention.executors import hopper_kernels
from sparse_transformer.attention.executors.block_executor import Hopper
from sparse_transformer.patterns import Causal, Local, Strided

# Longer than the stages of shared memory, so that buffers are used again.
HEADS, N = (Causal(), Local(100) | Strided(20)), 300
# What is wrong, and a text of hopper_kernels.py with its change.
RACES = {
  "a buffer is overwritten as it is read": (
    "pl.when(is_reused[-)-]{+ & False)+}(lambda: plgpu.barrier_wait(free))"
  ),
  "a buffer is free before it is read": (
    "[-carry = body(other, mask, carry)-]"
    "{+plgpu.barrier_arrive(buffers.free.at[stage]);"
    " carry = body(other, mask, carry)+}"
  ),
  "a buffer is read before it is full": (
    "[-plgpu.barrier_wait(buffers.full.at[stage])-]{+pass+}"
  ),
  "the item is read before it is there": (
    "[-plgpu.barrier_wait(self._buffers.arrived)-]{+pass+}"
  ),
}


@dataclasses.dataclass(frozen=True)
class Mutant(Hopper):
  """Kernels with a text of their source replaced."""

  interpret: bool = True
  change: str = ""

  def kernels(self):
    return laws.mutant(self.change, hopper_kernels)


@pytest.fixture
def register():
  """register(executor) names it "tried"; what the interpreter keeps is lost."""
  if jax.__version_info__ < Hopper.MIN_JAX:
    pytest.skip("needs a later jax")
  yield lambda executor: registry.register("tried", executor)
  from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

  registry.unregister("tried")
  laws.run.clear_cache()
  gpu_callbacks.reset_gpu_interpret_mode_state()


@pytest.mark.parametrize(
  "heads, n, options",
  [
    (HEADS[:1], 200, laws.PLAIN),
    pytest.param(
      HEADS * 2,
      200,
      dataclasses.replace(laws.OPTIONS[3], group=2),
      marks=pytest.mark.soak,
    ),
  ],
)
def test_two_warpgroups_share_a_tile(register, heads, n, options):
  register(Hopper(interpret=True))
  inputs = laws.random_inputs(
    n, len(heads), 64, 64, 1, jnp.bfloat16, group=options.group
  )
  found = laws.run(*inputs, heads, "tried", 128, options=options)
  laws.assert_close(found, laws.reference(*inputs, heads, options), 0.02)


@pytest.mark.parametrize("name", RACES)
@pytest.mark.one_in(4)
def test_races_are_found(register, name):
  register(Mutant(change=RACES[name]))
  inputs = laws.random_inputs(N, len(HEADS), 16, 16, batch=1)
  with pytest.raises(Exception, match="RACE|phase"):
    laws.run(*inputs, HEADS, "tried", 64)


def test_gradients_are_traced_within_shard_map(register):
  register(Hopper(interpret=True))
  q = laws.random_inputs(64, 1)[0]
  run = lambda q: attend(q, q, q, Local(5), backend="tried")
  mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
  with jax.sharding.use_abstract_mesh(mesh):
    run = jax.shard_map(run, in_specs=P("x"), out_specs=P("x"))
    grad = jax.grad(lambda q: run(q).sum())
    assert jax.eval_shape(grad, q).shape == q.shape


def test_older_versions_of_jax_are_rejected(monkeypatch):
  monkeypatch.setattr(jax, "__version_info__", (0, 11, 1))
  case = Case(1, 999, 4, 64, 64, "bfloat16", "cuda")
  assert "it needs jax 0.11.2" in Hopper().unsupported(case)
