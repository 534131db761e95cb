"""Scans of images: tables, composition, and networks that are told of them."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from helpers import networks, runs
from helpers.errors import refused

from sparse_transformer.data import arrangements
from sparse_transformer.data.scans import Scans
from sparse_transformer.model import sampling, transformer
from sparse_transformer.training.experiment import Experiment

SHAPE = (4, 4, 3)
KINDS = ("rotation", "colors", "transposition", "jigsaw")
IMAGE = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
EVERY = Scans((*KINDS, "reverse", "random:5"), SHAPE)


def jigsaw(order):
  """The image with quarter order[i] in the place of quarter i."""
  halves = slice(2), slice(2, 4)
  quarters = [*itertools.product(halves, halves)]
  image = IMAGE.copy()
  for i, j in enumerate(order):
    image[quarters[i]] = IMAGE[quarters[j]]
  return image


NUMPY = dict(
  rotation=[np.rot90(IMAGE, -turns) for turns in range(4)],
  colors=[IMAGE[..., x] for x in itertools.permutations(range(3))],
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
    identity = np.arange(table_NL.shape[1])
    assert (np.sort(table_NL) == identity).all()
    assert (table_NL[0] == identity).all()
    assert len(np.unique(table_NL, axis=0)) == len(table_NL)
  sizes = [len(table_NL) for table_NL in EVERY.tables.values()]
  assert sizes == [4, 6, 2, 24, 2, 5]


def test_scans_are_composed_one_after_another():
  labels = EVERY.labels(["rotation=1", "colors=3", "transposition=1"])
  assert labels == (1, 3, 1, 0, 0, 0)

  flat = IMAGE.reshape(-1)
  row = EVERY.arrange(flat, labels)
  symbols = row[:-6]
  turned = np.rot90(IMAGE, -1)
  colored = turned[..., [1, 2, 0]]
  expected = colored.swapaxes(0, 1)
  np.testing.assert_array_equal(symbols, expected.reshape(-1))
  np.testing.assert_array_equal(row[-6:], labels)

  (restored,) = EVERY.restore(symbols[None], labels)
  np.testing.assert_array_equal(restored, flat)
  # A symbol and its place in the image move together.
  (places,) = EVERY.places(np.array([labels]))
  np.testing.assert_array_equal(symbols, flat[places])
  assert sorted(places) == [*range(48)]


def test_order_that_is_named_twice_is_refused():
  with refused("=2 must be .*=0 to 4, each at most once"):
    EVERY.labels(["rotation=1", "colors=3", "rotation=2"])


def test_labels_are_a_function_of_the_seed_and_as_frequent():
  assert EVERY.draw(7, 12, 3) == (3, 3, 1, 12, 0, 3)  # for ever

  drawn = np.array([EVERY.draw(0, step, 1) for step in range(2400)])

  def deviation(labels, number):
    """The largest one of a label's frequency from that of all."""
    counts = np.bincount(labels, minlength=number)
    return abs(counts / (2400 / number) - 1).max()

  for table, labels in zip(EVERY.tables.values(), drawn.T, strict=True):
    assert deviation(labels, len(table)) < 0.4

  # Labels of two kinds, of 4 and of 2, are independent.
  rotation = drawn[:, 0]
  transposition = drawn[:, 2]
  assert deviation(2 * rotation + transposition, 8) < 0.2


def test_without_scans_there_is_one_order(monkeypatch):
  monkeypatch.setattr(arrangements, "ARRANGEMENTS", [])
  with refused("data.orders=.*rotation.* must be empty"):
    arrangements.of(["rotation"], SHAPE)

  plain = arrangements.of([], SHAPE)
  flat = IMAGE.reshape(-1)
  assert not plain
  assert plain.draw(7, 12) == plain.labels([]) == ()
  np.testing.assert_array_equal(plain.arrange(flat, ()), flat)
  np.testing.assert_array_equal(plain.restore(flat[None], ()), flat[None])


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
  examples = source.examples("train")
  rows_BM = np.asarray(experiment.batch(3))
  symbols_BL = rows_BM[:, :64]
  labels_B2 = rows_BM[:, 64:]
  assert rows_BM.shape == (8, 64 + 2)
  assert len(np.unique(labels_B2, axis=0)) > 5

  embed = transformer.bind(experiment.model, params).embed
  embedded_BLD = embed(symbols_BL, labels_B2)
  start = params["start"]
  for i, number in enumerate(experiment.numbers[3]):
    image = examples[int(number)]
    (places,) = source.arrangement.places(labels_B2[i : i + 1])
    np.testing.assert_array_equal(symbols_BL[i], image[places])

    x_LD = embedded_BLD[i]
    in_order_LD = embed(image[None])[0]
    before = places[:-1]
    is_read = before < 63  # the last symbol is not, where images are in order
    expected = in_order_LD[before[is_read] + 1]
    np.testing.assert_array_equal(x_LD[1:][is_read], expected)

    rotation, jigsaw = labels_B2[i]
    expected = start["rotation"][rotation] + start["jigsaw"][jigsaw]
    np.testing.assert_allclose(x_LD[0], expected, rtol=1e-6)


def test_symbols_do_not_depend_on_later_ones_in_any_order(network):
  experiment, params = network
  apply = jax.jit(experiment.apply)
  row = np.asarray(experiment.batch(0))[:1]
  logits = apply(params, row)

  def differs(changed):
    """Whether the logits of each position are others."""
    return (apply(params, changed) != logits).any((0, 2))

  for t in (0, 17, 62):
    changed = row.copy()
    changed[0, t] = (changed[0, t] + 1) % 17
    differs_L = differs(changed)
    assert not differs_L[: t + 1].any()
    assert differs_L[t + 1]

  other = row.copy()
  other[0, 64:] = (row[0, 64:] + 1) % 4  # another order of the same symbols
  assert differs(other).all()


def test_samples_in_an_order_do_not_depend_on_the_decoder(network):
  experiment, params = network
  prompts = np.asarray(experiment.batch(1))[:2, :40]
  sampler = sampling.Sampler()

  def draw(decoder):
    return sampling.sample(decoder, params, sampler, prompts, 64)[0]

  cached = sampling.Cached(experiment.model, (3, 7))
  plain = sampling.Recompute(experiment.apply, 64, (3, 7))
  np.testing.assert_array_equal(draw(cached), draw(plain))


def test_eval_scores_images_in_an_order(network, tmp_path, capfd):
  experiment, params = network

  def change(state):
    return dataclasses.replace(state, ema=params)

  runs.untrained(tmp_path, experiment.config, change)
  arrangement = experiment.source.arrangement
  images = experiment.source.examples("test")
  for orders in ([], ["jigsaw=9", "rotation=1"]):
    words = [f"--order={','.join(orders)}"] if orders else []
    (found,) = runs.scores(capfd, tmp_path, *words)
    labels = arrangement.labels(orders)
    rows = np.stack([arrangement.arrange(image, labels) for image in images])
    nats = np.asarray(experiment.losses(params, rows)).mean()
    assert found["bits_per_dim"] == pytest.approx(nats / np.log(2), rel=1e-5)
    assert ("order" in found["overrides"]) == bool(orders)

  assert len([*(tmp_path / "evaluations").glob("*.json")]) == 2


@pytest.mark.parametrize("name", ["rotation", "transposition", "jigsaw"])
def test_order_needs_images_that_have_it(name):
  with refused(f"images of .5, 4, 1. have no order '{name}'"):
    Scans((name,), (5, 4, 1))
