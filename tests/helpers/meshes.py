"""Trains a tiny network on meshes of 8 devices.

python tests/helpers/meshes.py JSON

Needs XLA_FLAGS=--xla_force_host_platform_device_count=8.

The argument has `meshes`, a list of {axis: size}, `changes` of the config, and
the number of `steps`. Prints as JSON, for one device and then for each mesh,
the losses of these steps, bytes on a device, and what devices exchange; and,
for the state after them on each, the loss of the next step on another: there it
was restored from a checkpoint, and compared bit for bit.
"""

import json
import os
import re
import sys
import tempfile

import jax
import numpy as np
from helpers import runs

from sparse_transformer.training import costs
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.experiment import Experiment

TINY = {
  "model.num_layers": 2,
  "model.num_heads": 4,
  "model.width": 32,
  "model.dropout": 0.1,
  "train.accumulation": 2,
  "train.batch_size": 16,
  "train.steps": 30,
  "optimizer.learning_rate": 3e-3,
}


class Run:
  """An experiment on a mesh, with its step, compiled once."""

  def __init__(self, mesh, changes):
    axes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    devices = tuple(jax.devices()[: 8 if mesh else 1])
    self.experiment = Experiment(runs.tiny(**TINY | changes | axes), devices)
    self.like = self.experiment.like
    with jax.set_mesh(self.experiment.mesh):
      lowered = self.experiment.update.lower(
        self.like, self.experiment.batch(0)
      )

    self.update = lowered.compile()

  def advance(self, state, step):
    """(the state after a step, its loss)."""
    state, measured = self.update(state, self.experiment.batch(step))
    return state, float(measured["nats"])

  def train(self, steps):
    """(the state after all steps, what is printed)."""
    state = self.experiment.first_state()
    nats = []
    for step in range(steps):
      state, loss = self.advance(state, step)
      nats.append(loss)
    parts = dict(
      parameters=state.params,
      optimizer=state.opt_state,
      average=state.ema,
    )
    explained = costs.memory(self.experiment.config, self.experiment.model)
    return state, dict(
      nats=nats,
      bytes={name: bytes_on_device(part) for name, part in parts.items()},
      explained={name: explained[name] for name in parts},
      exchanged=exchanged(self.update.as_text()),
    )


def bytes_on_device(tree):
  leaves = jax.tree.leaves(tree)
  return sum(x.addressable_shards[0].data.nbytes for x in leaves)


def exchanged(program):
  """[kind, shapes] of what devices exchange; groups of one exchange nothing."""
  found = re.findall(
    r"= (.*?) (all-\w+|reduce-scatter|collective-permute)\((.*)", program
  )
  return [
    [kind, [x.split(",") for x in re.findall(r"\[([\d,]*)\]", shapes)]]
    for shapes, kind, rest in found
    if "replica_groups={{0},{1}" not in rest
  ]


def arrays(state):
  return [np.asarray(x) for x in jax.tree.leaves(state)]


def check_restored(all_runs, states, steps):
  """Saves the state of each mesh, and restores it on the next one.

  Returns:
    For each, the loss of the next step there.
  """
  losses = []
  for i, state in enumerate(states):
    other = all_runs[(i + 1) % len(all_runs)]
    expected = [x.tobytes() for x in arrays(state)]
    with tempfile.TemporaryDirectory() as folder:
      with store.Saver(folder, keep=1) as saver:
        saver.save(state)
      found = store.Saved(folder).restore(other.like)
      assert [x.tobytes() for x in arrays(found)] == expected
      like = jax.tree.leaves(other.like)
      for x, y in zip(jax.tree.leaves(found), like, strict=True):
        assert x.sharding == y.sharding
      losses.append(other.advance(found, steps)[1])
      assert os.listdir(f"{folder}/checkpoints") == [str(steps)]

  return losses


def main():
  jax.config.update("jax_disable_most_optimizations", True)
  request = json.loads(sys.argv[1])
  meshes = [{}, *request["meshes"]]
  all_runs = [Run(mesh, request["changes"]) for mesh in meshes]
  steps = request["steps"]
  states, results = zip(*(run.train(steps) for run in all_runs), strict=True)
  restored = check_restored(all_runs, states, steps)
  print(
    json.dumps(
      dict(
        results=results,
        restored=restored,
      )
    )
  )


if __name__ == "__main__":
  main()
