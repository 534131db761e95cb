"""Tests of generated.py: what the sequences are, and that reach decides."""

import numpy as np
import pytest
from helpers.reference_reach import reach
from helpers.small_data import source_of

from configs import repeat
from sparse_transformer import data
from sparse_transformer.training.experiment import Experiment


def sequences(name, split="test", **changes):
  """The sequences of a split, uint8 [number, length]."""
  source = source_of(name, **changes)
  return source.load()[split].reshape(-1, source.length)


def test_copies_have_as_many_new_symbols_as_the_noise_says():
  exact = sequences("repeat", period=6, noise=0.0)
  assert set(exact.flat) == set(range(7))
  np.testing.assert_array_equal(exact[:, 6:], exact[:, :-6])

  noisy = sequences("repeat", period=6, noise=0.2)
  original = noisy[:, np.arange(16) % 6]
  is_changed = noisy != original
  # One of seven draws is the old symbol.
  share = is_changed[:, 6:].mean(axis=0)

  np.testing.assert_allclose(share, 0.2 * 6 / 7, atol=0.02)


def test_every_key_is_asked_once_and_answered_by_its_value():
  for found in sequences("recall", length=20, pairs=3)[:100]:
    shown = dict(found[:6].reshape(3, 2))
    asked = dict(found[14:].reshape(3, 2))
    assert not found[6:14].any()
    assert shown == asked
    assert shown.keys() == {1, 2, 3}
    assert {*shown.values()} <= {4, 5, 6}


@pytest.mark.parametrize(
  "name, changes",
  [
    ("repeat", dict(symbols=2, period=3, noise=0.0)),
    ("repeat", dict(symbols=2, period=3, noise=0.3)),
    ("repeat", dict(symbols=3, period=2, noise=1.0)),
    ("recall", dict(pairs=1)),
    ("recall", dict(pairs=2)),
  ],
)
def test_optimum_is_the_entropy_of_the_sequences(name, changes):
  changes |= dict(length=8)
  found = sequences(name, "train", **changes)
  _, counts = np.unique(found.view(np.uint64), return_counts=True)
  share = counts / counts.sum()
  bits = -(share * np.log2(share)).sum() / 8
  optimum = source_of(name, **changes).optimum
  assert bits == pytest.approx(optimum, abs=2e-3)


@pytest.mark.parametrize("name", ["repeat", "recall"])
def test_splits_share_no_sequence(name):
  changes = dict(
    length=64,
    columns=64,
    period=32,
    pairs=16,
  )
  distinct = set()
  number = 0
  for split in data.SPLITS:
    of_split = {*map(bytes, sequences(name, split, **changes))}
    distinct |= of_split
    number += len(of_split)
  assert len(distinct) == number == 2**16 + 2**13


# Patterns of about 16 keys a query. What two layers of the last two see ends 30
# positions back, or 30 before a multiple of 32: a period is one more.
@pytest.mark.soak
@pytest.mark.parametrize(
  "pattern, sees",
  [
    ("Local(8) | Strided(32, offset=1)", True),
    ("Local(8) | Strided(32)", False),
    ("Local(16)", False),
  ],
)
def test_repeat_is_learned_if_keys_are_a_period_back(pattern, sees):
  config = repeat.get_config()
  changes = {
    "attention.pattern": pattern,
    "data.length": 256,
    "data.columns": 32,
    "data.period": 32,
    "train.batch_size": 4,
    "train.steps": 40,
    "optimizer.learning_rate": 0.03,
    "optimizer.warmup_steps": 10,
  }
  config.update_from_flattened_dict(changes)
  experiment = Experiment(config)
  # Key k holds symbol k - 1, and the first key none.
  q, k = np.nonzero(reach(experiment.model.patterns, 256))
  assert np.any((k > 0) & ((q + 1 - k) % 32 == 0)) == sees

  state = experiment.first_state()
  for step in range(40):  # each batch is new
    state, measured = experiment.update(state, experiment.batch(step))
  bits = measured["nats"] / np.log(2)

  # The optimum, and chance.
  assert bits < 0.5 + 0.05 if sees else bits > 3.9
