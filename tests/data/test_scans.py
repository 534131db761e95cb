"""Scans of images: tables, composition, and networks that are told of them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from helpers import networks, runs
from helpers.errors import refused

from sparse_transformer.data import Scans
from sparse_transformer.model import sampling, transformer
from sparse_transformer.training.experiment import Experiment

SHAPE = (4, 4, 3)
KINDS = ("rotation", "colors", "transposition", "jigsaw")
IMAGE = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
EVERY = Scans((*KINDS, "reverse", "random:5"), SHAPE)


def jigsaw(order):
  """The image with quarter order[i] in the place of quarter i."""
  at = [*itertools.product((slice(2), slice(2, 4)), repeat=2)]
  new = IMAGE.copy()
  for i, j in enumerate(order):
    new[at[i]] = IMAGE[at[j]]
  return new


NUMPY = dict(
  rotation=[np.rot90(IMAGE, -turns) for turns in range(4)],
  colors=[IMAGE.take(x, 2) for x in itertools.permutations(range(3))],
  transposition=[IMAGE, IMAGE.transpose(1, 0, 2)],
  reverse=[IMAGE, np.flip(IMAGE, (0, 1))],
  jigsaw=[jigsaw(x) for x in itertools.permutations(range(4))],
)


@pytest.mark.parametrize("name", NUMPY)
def test_table_is_what_numpy_does(name):
  found = IMAGE.reshape(-1)[EVERY.tables[name]].reshape(-1, *SHAPE)
  np.testing.assert_array_equal(found, NUMPY[name])


def test_tables_are_different_permutations_with_the_identity_first():
  for table_NL in EVERY.tables.values():
    n = table_NL.shape[1]
    assert (np.sort(table_NL) == np.arange(n)).all()
    assert (table_NL[0] == np.arange(n)).all()
    assert len(np.unique(table_NL, axis=0)) == len(table_NL)
  assert [len(x) for x in EVERY.tables.values()] == [4, 6, 2, 24, 2, 5]


def test_scans_are_composed_one_after_another():
  labels = EVERY.labels(["rotation=1", "colors=3", "transposition=1"])
  assert labels == (1, 3, 1, 0, 0, 0)

  flat = IMAGE.reshape(-1)
  row = EVERY.arrange(flat, labels)
  turned = np.rot90(IMAGE, -1)
  expected = turned[..., [1, 2, 0]].swapaxes(0, 1)

  np.testing.assert_array_equal(row[:-6], expected.reshape(-1))
  np.testing.assert_array_equal(row[-6:], labels)
  (restored,) = EVERY.restore(row[None, :-6], labels)
  np.testing.assert_array_equal(restored, flat)

  # A symbol and its place in the image move together.
  (places,) = EVERY.places(np.array([labels]))
  np.testing.assert_array_equal(row[:-6], flat[places])
  assert sorted(places) == [*range(48)]


def test_order_that_is_named_twice_is_refused():
  with refused("=2 must be .*=0 to 4, each once"):
    EVERY.labels(["rotation=1", "colors=3", "rotation=2"])


def test_labels_are_a_function_of_the_seed_and_as_frequent():
  assert EVERY.draw(7, 12, 3) == (3, 3, 1, 12, 0, 3)  # for ever

  number = 2400
  drawn = np.array([EVERY.draw(0, step, 1) for step in range(number)])
  for table, labels in zip(EVERY.tables.values(), drawn.T, strict=True):
    expected = number / len(table)
    counts = np.bincount(labels, minlength=len(table))
    assert abs(counts / expected - 1).max() < 0.4

  # Labels of two kinds, of 4 and of 2, are independent.
  rotation = drawn[:, 0]
  transposition = drawn[:, 2]
  counts = np.bincount(2 * rotation + transposition, minlength=8)

  assert abs(counts / (number / 8) - 1).max() < 0.2


# Networks.


@pytest.fixture(scope="module")
def network():
  """(an experiment with scans, random parameters)."""
  settings = {
    "data.orders": ("rotation", "jigsaw"),
    "attention.window": 3,
  }
  experiment = Experiment(runs.tiny(**settings))
  return experiment, networks.random_params(experiment.model)


def test_batches_have_images_in_scans_and_the_network_is_told_which(network):
  experiment, params = network
  source = experiment.source
  rows_BM = np.asarray(experiment.batch(3))
  numbers = experiment.numbers[3]

  assert rows_BM.shape == (8, 64 + 2)
  assert len(np.unique(rows_BM[:, 64:], axis=0)) > 5

  embed = transformer.bind(experiment.model, params).embed
  found_BLD = embed(rows_BM[:, :64], rows_BM[:, 64:])
  images = [source.examples("train")[int(i)] for i in numbers]
  for x_LD, row, image in zip(found_BLD, rows_BM, images, strict=True):
    (places,) = source.scans.places(row[None, 64:])
    np.testing.assert_array_equal(row[:64], image[places])
    before = places[:-1]
    own_LD = embed(image[None])[0]
    at = before < 63  # the last symbol is not read where images are in order
    np.testing.assert_array_equal(x_LD[1:][at], own_LD[before[at] + 1])
    one, two = row[64:]
    expected = params["start"]["rotation"][one] + params["start"]["jigsaw"][two]
    np.testing.assert_allclose(x_LD[0], expected, rtol=1e-6)


def test_symbols_do_not_depend_on_later_ones_in_any_order(network):
  experiment, params = network
  apply = jax.jit(experiment.apply)
  row = np.asarray(experiment.batch(0))[:1]
  logits = apply(params, row)
  for t in (0, 17, 62):
    changed = row.copy()
    changed[0, t] = (changed[0, t] + 1) % 17
    differs = (apply(params, changed) != logits).any((0, 2))
    assert not differs[: t + 1].any()
    assert differs[t + 1]

  other = row.copy()
  other[0, 64:] = (row[0, 64:] + 1) % 4  # another order of the same symbols

  assert (apply(params, other) != logits).any((0, 2)).all()


def test_samples_in_an_order_do_not_depend_on_the_decoder(network):
  experiment, params = network
  given = np.asarray(experiment.batch(1))[:2, :40]
  inputs = params, sampling.Sampler(), given, 64
  cached = sampling.Cached(experiment.model, (3, 7))
  plain = sampling.Recompute(experiment.apply, 64, (3, 7))
  found = (sampling.sample(x, *inputs)[0] for x in (cached, plain))
  np.testing.assert_array_equal(*found)


def test_eval_scores_images_in_an_order(network, tmp_path, capfd):
  experiment, params = network

  def change(state):
    return dataclasses.replace(state, ema=params)

  runs.untrained(tmp_path, experiment.config, change)
  scans = experiment.source.scans
  images = experiment.source.examples("test")
  for words in ([], ["jigsaw=9", "rotation=1"]):
    flags = [f"--order={','.join(words)}"] if words else []
    (found,) = runs.scores(capfd, tmp_path, *flags)
    labels = scans.labels(words)
    rows = [scans.arrange(image, labels) for image in images]
    nats = np.mean(np.asarray(experiment.losses(params, np.stack(rows))))
    assert found["bits_per_dim"] == pytest.approx(nats / np.log(2), rel=1e-5)
    assert ("order" in found["overrides"]) == bool(words)

  assert len([*(tmp_path / "evaluations").glob("*.json")]) == 2


@pytest.mark.parametrize("name", ["rotation", "transposition", "jigsaw"])
def test_order_needs_images_that_have_it(name):
  with refused(f"images of .5, 4, 1. have no '{name}'"):
    Scans((name,), (5, 4, 1))
