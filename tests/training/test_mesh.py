"""Tests of training on meshes: what fits one, and that results are the same."""

import itertools
import json

import jax
import numpy as np
import pytest
from helpers import runs
from helpers.errors import refused
from jax.sharding import PartitionSpec

from sparse_transformer.model import sharding
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment

ONE = dict.fromkeys(sharding.AXES, 1)


def config(**axes):
  return runs.tiny(**{f"mesh.{axis}": size for axis, size in axes.items()})


def check(experiment):
  """All that a run on 8 devices is checked for."""
  sizes = mesh.sizes(experiment.config, 8)
  mesh.check_batch(experiment.config, sizes)
  mesh.check_batch(experiment.config, sizes, "eval")
  mesh.check_network(experiment.model, sizes)
  return sizes


# What fits.


@pytest.mark.parametrize(
  "axes, expected",
  [
    (dict(), dict(data=8)),
    (dict(fsdp=4), dict(data=2, fsdp=4)),
    (dict(data=1, fsdp=-1), dict(fsdp=8)),
    (
      dict(fsdp=2, sequence=2, tensor=2),
      dict(fsdp=2, sequence=2, tensor=2),
    ),
  ],
)
def test_axis_of_minus_one_is_what_is_left(axes, expected):
  assert check(Experiment(config(**axes))) == ONE | expected


@pytest.mark.parametrize(
  "changes, words",
  [
    (
      {"mesh.data": 2, "mesh.fsdp": 2},
      "=2 x mesh.sequence=1 x mesh.tensor=1 needs 4 devices, but there are 8",
    ),
    ({"mesh.tensor": 3}, "needs a multiple of 3 devices, but there are 8"),
    ({"mesh.fsdp": -1}, "only one axis can be -1"),
    (
      {"train.accumulation": 2},
      "a multiple of mesh.data=8 x mesh.fsdp=1 x train.accumulation=2",
    ),
    ({"eval.batch_size": 4}, "eval.batch_size=4 must be a multiple of"),
    (
      {"mesh.sequence": 8, "data.name": "bytes", "data.length": 100},
      "the length of a sequence=100 must be a multiple of mesh.sequence=8",
    ),
    (
      {"mesh.fsdp": 8, "mesh.data": 1, "model.width": 20},
      "model.width=20 must be a multiple of mesh.fsdp=8",
    ),
    (
      {"mesh.tensor": 4, "model.num_heads": 2},
      "model.num_heads=2 must be a multiple of mesh.tensor=4",
    ),
  ],
)
def test_what_cannot_be_split_is_rejected_with_its_numbers(changes, words):
  with refused(words):
    check(Experiment(runs.tiny(**changes)))


# Rules.


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_all_matrices_of_blocks_are_split_and_nothing_else(optimizer):
  changes = {
    "model.num_layers": 2,
    "model.experts": 4,
    "optimizer.name": optimizer,
  }
  state = jax.eval_shape(Experiment(runs.tiny(**changes)).init)
  split = {}
  for path, x in jax.tree_util.tree_leaves_with_path(state):
    name = jax.tree_util.keystr(
      path,
      simple=True,
      separator=".",
    )
    if any(sharding.spec(path, x)):
      split[name] = x.ndim
    else:  # vectors, stacked or not; embeddings, logits and routers
      assert x.ndim < 3 or name.endswith(
        ("router.kernel", "experts_in.bias", "experts_out.bias")
      )

  params = [name for name in split if name.startswith("params.")]

  assert sum(split[name] == 3 for name in params) == 6 + 4
  assert sum(split[name] == 4 for name in params) == 2  # of experts
  moments = [name for name in split if name.startswith("opt_state.")]
  assert len(moments) == len(params) * (2 if optimizer == "adamw" else 1)


def test_layers_and_experts_are_not_split():
  def spec(name, *shape):
    path = [jax.tree_util.DictKey(x) for x in ("blocks", name, "kernel")]
    return sharding.spec(path, np.zeros(shape))

  expected = PartitionSpec(None, "tensor", "fsdp")
  assert spec("mlp_out", 2, 3, 4) == expected
  expected = PartitionSpec(None, None, "fsdp", "tensor")
  assert spec("experts_in", 2, 3, 4, 5) == expected


# Runs in a separate process with 8 devices.


def train_on(*meshes, steps=20, **changes):
  request = json.dumps(
    dict(
      meshes=meshes,
      changes=changes,
      steps=steps,
    )
  )
  done = runs.python("tests/helpers/meshes.py", request, **runs.environment(8))

  assert done.returncode == 0, done.stderr[-3000:]
  found = json.loads(done.stdout)
  one, *others = found["results"]

  for result in (one, *others):
    # Each step has its own dropout and examples, so that all differ.
    np.testing.assert_allclose(result["nats"], one["nats"], atol=1e-5)
    assert result["bytes"] == result["explained"]
  # The next step after each of the states, on another mesh.
  losses = found["restored"]
  np.testing.assert_allclose(losses, losses[0], atol=1e-4)
  return one, others


def test_meshes_train_as_one_device_and_restore_each_others_checkpoints():
  one, (fsdp, _) = train_on(
    dict(
      data=1,
      fsdp=8,
    ),
    dict(
      data=1,
      fsdp=2,
      sequence=2,
      tensor=2,
    ),
    steps=3,
    **{
      "model.num_layers": 1,
      "attention.pattern": "Strided(8)",
    },
    **{"train.accumulation": 1},
  )
  weights = one["bytes"]["parameters"]

  assert fsdp["bytes"]["parameters"] < weights / 3  # embeddings are whole
  # Weights are gathered, and their gradients added up. Activations, which have
  # an axis of 64 positions, stay where they are.
  kinds, shapes = zip(*fsdp["exchanged"], strict=True)
  assert set(kinds) == {"all-gather", "all-reduce"}
  assert not any("64" in x for x in itertools.chain(*shapes))


@pytest.mark.soak
@pytest.mark.parametrize(
  "more",
  [
    {},
    {"model.experts": 4},
    {"optimizer.name": "muon"},
    {"attention.pattern": "LSH(8, 4), Local(9)"},
    {"attention.pattern": "Local(40)", "model.max_span": 32},
    {"data.orders": ("rotation", "random:5")},
  ],
)
def test_all_meshes_train_as_one_device(more):
  meshes = [dict(data=1, fsdp=2, sequence=2, tensor=2)]
  if "attention.pattern" in more:  # need whole heads
    meshes.append(dict(data=2, sequence=4))
  else:
    meshes += [
      dict(data=2, fsdp=2, sequence=2),
      dict(data=8),
      dict(data=1, fsdp=8),
      dict(data=1, sequence=8),
      dict(data=2, tensor=4),
    ]

  train_on(*meshes, **more)
