"""Tests of what a config is checked for when it becomes an experiment."""

import jax
import pytest
import runs

from sparse_transformer.training import experiment


def test_batch_that_cannot_be_split_across_devices_is_rejected(monkeypatch):
  monkeypatch.setattr(jax, "local_device_count", lambda: 3)
  with pytest.raises(ValueError, match="train.batch_size=8 .* of 3 devices"):
    experiment.check_batch(runs.tiny())
  with pytest.raises(ValueError, match="eval.batch_size=8 .* of 3 devices"):
    experiment.check_eval_batch(runs.tiny())


def test_batch_that_micro_batches_do_not_divide_is_rejected():
  config = runs.tiny(**{"train.accumulation": 3})
  with pytest.raises(ValueError, match="batch_size=8 .* train.accumulation=3"):
    experiment.check_batch(config)
