"""Networks and runs with learned spans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks, runs
from scipy import stats

from sparse_transformer import model
from sparse_transformer.model.options import learned_spans
from sparse_transformer.patterns import Causal, Local
from sparse_transformer.training import loop
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.reports import head_statistics

PATTERNS = ((Causal(), Local(50)), (Local(5),) * 2)
SPANS = np.float32([[0.35, 0.52], [0.71, 0.13]])


@pytest.fixture(autouse=True)
def short_ramp(monkeypatch):
  monkeypatch.setattr(learned_spans, "RAMP", 4)


def network(**changes):
  settings = dict(
    num_layers=2,
    patterns=PATTERNS,
    max_span=10,
  )
  return networks.config(**settings | changes)


def ramp(span, n):
  """The weights of pairs by Sukhbaatar et al. 2019, section 2."""
  distance = np.abs(np.arange(n)[:, None] - np.arange(n))
  return np.clip((4 + span - distance) / 4, 0, 1)


def gradient_of_spans(config):
  """(what the network measures, the gradient of a loss by the spans)."""
  params = networks.random_params(config)
  tokens = networks.tokens(config)
  predict = model.make_predict(config)

  def loss(spans):
    logits, measured = predict(params | {"spans": spans}, tokens)
    penalty = 0.1 * measured["span"].mean()
    return jnp.sin(logits).mean() + penalty, measured

  run = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (_, measured), gradient = run(SPANS)
  return measured, np.asarray(gradient)


def test_biases_are_the_logarithms_of_ramps():
  n = 12
  spans = jnp.array([0.0, 3.3, 20.0])

  def weights(spans):
    return jnp.exp(learned_spans.ramps(spans, n))

  of_pairs = n - 1 + np.arange(n)[:, None] - np.arange(n)
  for of_distances, span in zip(weights(spans), spans, strict=True):
    found = of_distances[of_pairs]
    np.testing.assert_allclose(found, ramp(span, n), atol=1e-6)

  gradient = jax.jacobian(weights)(spans)
  assert np.isfinite(gradient).all()
  distance = np.abs(np.arange(1 - n, n))
  on_ramp = (distance > spans[1]) & (distance < spans[1] + 4)
  np.testing.assert_allclose(gradient[1, :, 1], on_ramp / 4, rtol=1e-5)


@pytest.mark.soak
def test_heads_of_layers_have_spans_of_their_own():
  measured, expected = gradient_of_spans(network(backend="dense"))

  np.testing.assert_allclose(measured["spans"], 10 * SPANS, 1e-6)
  np.testing.assert_allclose(measured["span"], [4.35, 4.2], 1e-6)
  assert np.all(expected != 0)

  blocked = network(
    backend="streamed",
    remat="block_but_attention",
  )
  _, found = gradient_of_spans(blocked)

  np.testing.assert_allclose(found, expected, atol=2e-5)


def test_projection_keeps_spans_within_bounds():
  assert model.project({"start": 2}) == {"start": 2}
  clipped = model.project({"spans": jnp.array([-0.1, 0.5, 1.2])})
  np.testing.assert_array_equal(clipped["spans"], np.float32([0, 0.5, 1]))


@pytest.mark.soak
def test_penalty_shortens_spans_within_bounds(monkeypatch):
  monkeypatch.setitem(model.LOSS_WEIGHTS, "span", 10.0)
  changes = {
    "attention.pattern": "Local(48)",
    "attention.backend": "dense",
    "model.max_span": 40,
    "model.num_layers": 2,
    "optimizer.learning_rate": 0.3,
  }
  experiment = Experiment(runs.tiny(**changes))
  step = jax.jit(experiment.train_step)
  state = experiment.init()
  state.params["spans"] = jnp.full((2, 2), 0.5)
  # The first update of the warm-up is 0; the next are of the learning rate.
  for i, expected in enumerate((20, 20, 8)):
    state, measured = step(state, np.asarray(experiment.batch(i)))
    line = loop._finite(measured)
    assert np.shape(line["spans"]) == (2, 2)
    np.testing.assert_allclose(line["spans"], expected, atol=0.1)
    np.testing.assert_allclose(line["span"], expected, atol=0.1)

  np.testing.assert_array_equal(state.params["spans"], np.zeros((2, 2)))


def test_drawn_weights_have_ramps():
  config = network(
    num_layers=1,
    patterns=(PATTERNS[0],),
  )
  params = networks.random_params(config)
  params["spans"] = jnp.array([[0.31, 0.52]])
  random = np.random.default_rng(0)
  q, k = random.normal(size=(2, 1, 20, 2, 4)).astype(np.float32)
  ((_, heads),) = head_statistics.weigh(config, params, {0: (q, k)})
  for h, span in enumerate((3.1, 5.2)):
    weights = ramp(span, 20) * Causal().matrix(20)
    scores = q[0, :, h] @ k[0, :, h].T / 2
    p = weights * np.exp(scores)
    p /= p.sum(1, keepdims=True)
    bits = stats.entropy(p, base=2, axis=1).mean()
    np.testing.assert_allclose(heads[h].entropy, bits, rtol=1e-4)
    assert heads[h].pairs == (weights > 0).sum()
