"""Networks and runs with learned spans."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks, runs

from sparse_transformer import model
from sparse_transformer.patterns import AdaptiveSpan, Local
from sparse_transformer.training import loop
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.reports import head_statistics

SPAN = AdaptiveSpan(10, 4)
# Of three layers; the second has no spans, the last one in its first head only.
PATTERNS = ((SPAN, Local(3) | SPAN), (Local(5),) * 2, (SPAN, Local(2)))


def network(**changes):
  settings = dict(
    num_layers=3,
    patterns=PATTERNS,
  )
  return networks.config(**settings | changes)


def gradient_of_spans(config):
  """(what the network measures, the gradient of a loss by the spans)."""
  params = networks.random_params(config)
  tokens = networks.tokens(config)
  spans = jnp.array([[0.35, 0.52], [0.71, 0.13], [0.94, 0.22]])

  def loss(spans):
    inputs = params | {"spans": spans}, tokens
    logits, measured = model.make_predict(config)(*inputs)
    return jnp.sin(logits).mean() + 0.1 * measured["span"].mean(), measured

  (_, measured), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
    spans
  )
  return measured, np.asarray(gradient)


@pytest.mark.soak
def test_heads_of_layers_have_spans_of_their_own():
  measured, expected = gradient_of_spans(network(backend="dense"))
  np.testing.assert_allclose(measured["spans"], [[3.5, 5.2], [9.4, 0]], 1e-6)
  np.testing.assert_allclose(measured["span"], [4.35, 9.4], 1e-6)
  assert (
    (expected != 0) == [[True, True], [False, False], [True, False]]
  ).all()

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
  config = runs.tiny(
    **{
      "attention.pattern": "(Local(3) | AdaptiveSpan(40, 8), Local(9)),",
      "attention.backend": "dense",
      "model.num_layers": 2,
      "optimizer.learning_rate": 0.3,
    }
  )
  experiment = Experiment(config)
  lines = []
  state = experiment.init()
  step = jax.jit(experiment.step)
  state.params["spans"] = jnp.full((2, 2), 0.5)
  for i in range(3):
    state, measured = step(state, np.asarray(experiment.batch(i)))
    lines.append(loop._finite(measured))
  # The first update of the warm-up is 0; the next are of the learning rate.
  expected = [[[20, 0]] * 2, [[20, 0]] * 2, [[8, 0]] * 2]
  found = [line["spans"] for line in lines]

  np.testing.assert_allclose(found, expected, atol=0.1)
  np.testing.assert_allclose([x["span"] for x in lines], [20, 20, 8], atol=0.1)
  np.testing.assert_array_equal(state.params["spans"], [[0, 0.5]] * 2)


def test_drawn_weights_have_ramps():
  config = network(num_layers=1, patterns=(PATTERNS[0],))
  params = networks.random_params(config)
  params["spans"] = jnp.array([[0.31, 0.52]])
  drawn = np.random.default_rng(0).normal(size=(2, 1, 20, 2, 4))
  q, k = drawn.astype(np.float32)
  ((_, drawn),) = head_statistics.weigh(config, params, {0: (q, k)})
  distance = np.arange(20)[:, None] - np.arange(20)
  for h, (head, span) in enumerate(zip(drawn, (3.1, 5.2), strict=True)):
    m = np.clip((4 + span - distance) / 4, 0, 1) * (distance >= 0)
    if h == 1:  # with the pairs of Local(3)
      m = np.maximum(m, Local(3).matrix(20))
    p = m * np.exp(q[0, :, h] @ k[0, :, h].T / 2)
    p /= p.sum(1, keepdims=True)
    bits = -(p * np.log2(np.where(p > 0, p, 1))).sum(1).mean()
    np.testing.assert_allclose(head.entropy, bits, rtol=1e-4)
    assert head.pairs == (m > 0).sum()
