"""Tests of runs whose networks have experts."""

import jax
import numpy as np
import pytest
from helpers import runs

from sparse_transformer.training import loop, metrics
from sparse_transformer.training.experiment import Experiment

EXPERTS = {
  "model.experts": 4,
  "model.num_layers": 2,
}


@pytest.mark.soak
def test_run_logs_losses_and_the_load_of_each_expert(tmp_path):
  config = runs.tiny(**EXPERTS | {"train.steps": 2})
  loop.train(config, tmp_path)
  for line in metrics.read(tmp_path):
    if line["split"] != "train":
      assert "load_balance" not in line
      continue
    assert 0.9 < line["load_balance"] < 4
    assert line["router_z"] > 0
    loads = np.array(line["expert_load"])
    assert loads.shape == (1, 4)  # block 1
    np.testing.assert_allclose(loads.sum(1), 4, atol=1e-3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [0, 1])
def test_balance_loss_keeps_the_load_within_a_factor_of_3(seed):
  changes = {
    "model.width": 32,
    "train.steps": 500,
    "train.seed": seed,
    "optimizer.learning_rate": 3e-3,
  }
  experiment = Experiment(runs.tiny(**EXPERTS | changes))
  step = jax.jit(experiment.train_step, donate_argnums=0)
  state = experiment.init()
  losses = []
  loads = []
  for i in range(500):
    state, measured = step(state, np.asarray(experiment.batch(i)))
    losses.append(float(measured["nats"]))
    loads.append(np.asarray(measured["expert_load"]))

  assert np.isfinite(losses).all()
  first = np.mean(losses[:50])
  last = np.mean(losses[-50:])
  assert last < 0.8 * first
  load = np.mean(loads[-50:], axis=0)
  assert load.min() > 1 / 3
  assert load.max() < 3
