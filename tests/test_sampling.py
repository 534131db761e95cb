"""Tests of sampling.py and its command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from PIL import Image

import train
from sparse_transformer import sampling
from sparse_transformer.experiment import Experiment

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def network():
  """(apply, params) of a random network over 17 symbols."""
  experiment = Experiment(runs.tiny())
  params = jax.jit(experiment.init)().params
  shape = params["logits"]["kernel"].shape
  params["logits"]["kernel"] = jax.random.normal(jax.random.key(1), shape)
  return experiment.apply, params


def test_temperature_zero_takes_the_best_symbol_step_by_step(network):
  apply, params = network
  found = sampling.sample(apply, params, num=2, length=12, temperature=0.0)
  expected = np.zeros((2, 12), np.uint8)
  for t in range(12):
    expected[:, t] = np.asarray(apply(params, expected))[:, t].argmax(-1)
  np.testing.assert_array_equal(found, expected)
  assert found.dtype == jnp.uint8
  assert len(np.unique(found)) > 1


def test_samples_follow_from_their_seed(network):
  draw = lambda seed: sampling.sample(*network, num=3, length=16, seed=seed)
  np.testing.assert_array_equal(draw(1), draw(1))
  assert (draw(1) != draw(2)).any()
  one = draw(1)
  assert (one[0] != one[1]).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_symbols_are_drawn_from_the_softmax(temperature):
  logits = np.random.RandomState(0).normal(size=5).astype(np.float32)

  def apply(params, tokens_BL):
    return jnp.broadcast_to(params, (*tokens_BL.shape, 5))

  num = 20_000
  found = sampling.sample(
    apply, logits[None, None], num=num, length=2, temperature=temperature
  )
  p = np.exp(logits / temperature)
  p /= p.sum()
  for t in range(2):
    share = np.bincount(np.asarray(found[:, t]), minlength=5) / num
    assert np.all(abs(share - p) < 5 * np.sqrt(p * (1 - p) / num))
  # Neighbours are drawn independently of each other.
  joint = np.mean((found[:, 0] == 0) & (found[:, 1] == 0))
  assert abs(joint - p[0] ** 2) < 5 * p[0] / np.sqrt(num)


def test_symbols_are_drawn_given_those_before():
  def apply(params, tokens_BL):  # each symbol is the one before plus one
    before = jnp.pad(tokens_BL.astype(jnp.int32), ((0, 0), (1, 0)))[:, :-1]
    return 1e3 * jax.nn.one_hot((before + 1) % 7, 7)

  found = sampling.sample(apply, {}, num=2, length=9)
  np.testing.assert_array_equal(found, [[1, 2, 3, 4, 5, 6, 0, 1, 2]] * 2)


def test_senseless_requests_are_errors(network):
  with pytest.raises(ValueError, match="num=0"):
    sampling.sample(*network, num=0, length=4)
  with pytest.raises(ValueError, match="temperature=-1"):
    sampling.sample(*network, num=1, length=4, temperature=-1)


def test_command_writes_text(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"some text " * 50)
  config = runs.text(path, **{"train.steps": 0, "model.num_layers": 1})
  train.train(config, tmp_path / "run")
  words = [f"--workdir={tmp_path / 'run'}", "--num=3"]
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  text = (tmp_path / "run" / "samples.txt").read_bytes()
  assert len(text) == 3 * 32 + 2 * len("\n\n")


def test_command_writes_images_beside_real_ones(tmp_path):
  config = runs.tiny(**{"train.steps": 0, "model.num_layers": 1})
  train.train(config, tmp_path)
  words = [f"--workdir={tmp_path}", "--num=4", "--seed=1"]
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  with Image.open(tmp_path / "samples.png") as image:
    # Two sheets of 2 x 2 images, each with a line, and a gap of half an image.
    width, height = 2 * 2 * 9 + 4, 2 * 9
    assert image.width % width == 0
    assert image.height * width == image.width * height
    assert len(image.getcolors()) > 2
