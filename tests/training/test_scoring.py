"""Tests of bits per dim, against sums written out in float64."""

import functools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.signal
from helpers import runs

from sparse_transformer import data
from sparse_transformer.training import step as step_lib
from sparse_transformer.training.evaluation import scoring
from sparse_transformer.training.experiment import Experiment

SHARDING = Experiment(runs.tiny()).batch_sharding


def stream(text, length):
  split = np.frombuffer(text, np.uint8)
  return data.Stream(length, 4, lambda: dict.fromkeys(data.SPLITS, split))


def log_probabilities(seed=0):
  """A Markov chain: each symbol given the previous one; last row: the first."""
  logits = np.random.RandomState(seed).normal(size=(257, 256))
  return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def markov(params, tokens_BL):
  """A network that sees the previous symbol; row 256 is for the first one."""
  before = jnp.pad(tokens_BL.astype(jnp.int32), ((0, 0), (1, 0)))[:, :-1]
  before = before.at[:, 0].set(256)
  return params[before]


def score(source, params, batch_size, min_context=0):
  params = jnp.asarray(params, jnp.float32)
  losses = functools.partial(step_lib.make_losses(markov), params)
  return scoring.score(
    losses,
    source.windows("test", min_context),
    batch_size=batch_size,
    sharding=SHARDING,
  )


@pytest.mark.parametrize(
  "min_context, size",
  [
    (0, 3),
    (0, 16),
    (5, 101),
  ],
)
def test_bits_per_dim_is_the_sum_written_out(min_context, size):
  length = 16
  table = log_probabilities()
  text = np.random.RandomState(size).randint(0, 256, size).astype(np.uint8)
  bits = []
  start = 0
  for i, symbol in enumerate(text):
    # Position i is scored in the first window that contains it.
    while i >= start + length:
      start += length - min_context
    before = text[i - 1] if i > start else 256
    bits.append(-table[before, symbol] / math.log(2))

  for batch_size in (1, 7):
    source = stream(text.tobytes(), length)
    result = score(source, table, batch_size, min_context)
    assert result.bits_per_dim == pytest.approx(np.mean(bits), abs=1e-6)
    assert result.tokens == size


def test_padding_never_counts():
  # Zeros, the padding, are very unlikely here: a single one would be noticed.
  table = np.zeros((257, 256))
  table[:, 0] = -1e4
  result = score(stream(b"\1" * 21, 16), table, batch_size=7)
  assert result.bits_per_dim == pytest.approx(math.log2(255), abs=1e-6)
  assert result.windows == 2
  assert result.tokens == 21


def autoregressive(n, phi):
  """Losses that forget at the rate `phi`, and the deviation of their mean."""
  noise = np.random.RandomState(0).normal(size=n)
  # In equilibrium from the start, with variance 1 / (1 - phi ** 2).
  start = phi / math.sqrt(1 - phi**2)
  nats, _ = scipy.signal.lfilter([1], [1, -phi], noise, zi=[start])
  variance = (n - 2 * phi * (1 - phi**n) / (1 - phi**2)) / (1 - phi) ** 2
  return nats, math.sqrt(variance) / n


def tally_windows(nats, length, min_context, block):
  """The tally of a stream of losses in windows, as `Stream.windows` cuts it."""
  step = length - min_context
  tally = scoring.Tally(length, block)
  count = 1 + -(-(len(nats) - length) // step)
  size = (count - 1) * step + length
  padded = np.full(size, np.nan)
  padded[: len(nats)] = nats
  windows_BL = np.lib.stride_tricks.sliding_window_view(padded, length)[::step]
  for part in range(0, count, 1000):
    nats_BL = windows_BL[part : part + 1000]
    scored_BL = ~np.isnan(nats_BL)
    # All windows but the first.
    scored_BL[part == 0 :, :min_context] = False
    tally.add(nats_BL, scored_BL)
  return tally


@pytest.mark.parametrize("phi", [0.5, 0.99])
def test_standard_error_of_correlated_losses_is_true_in_any_window(phi):
  """Windows of 128, if taken as independent, give errors that are too small."""
  nats, expected = autoregressive(300 * scoring.BLOCK + 1234, phi)
  errors = set()
  for length in (128, 512, 2048, 12_288):
    for min_context in (0, length // 2):
      result = tally_windows(nats, length, min_context, scoring.BLOCK)
      assert result.tokens == len(nats)
      errors.add(round(result.standard_error * math.log(2), 12))
  (error,) = errors

  assert error == pytest.approx(expected, rel=0.1)
  if phi > 0.9:
    result = tally_windows(nats, 128, 0, block=None)
    assert result.standard_error * math.log(2) < 0.7 * expected


def test_bits_by_position_and_by_channel_are_means_of_what_counts():
  random = np.random.RandomState(0)
  nats = random.rand(20, 12)
  scored = random.rand(20, 12) < 0.5
  scored[:, 4] = False
  tally = scoring.Tally(12)
  assert tally.bits_per_dim is None  # nothing is scored

  for part in range(4):
    tally.add(nats[part::4], scored[part::4])
  bits = np.where(scored, nats / math.log(2), np.nan)
  known = np.arange(12) != 4
  by_position = tally.means()
  assert np.isnan(by_position[4])
  expected = np.nanmean(bits[:, known], axis=0)
  np.testing.assert_allclose(by_position[known], expected)
  expected = [np.nanmean(bits[:, channel::3]) for channel in range(3)]
  np.testing.assert_allclose(tally.means(3), expected)


def test_memory_does_not_grow_with_the_split():
  """Only the windows of two batches and the first one are alive at a time."""
  alive = 0
  most = 0

  class Window(np.ndarray):
    def __del__(self):
      nonlocal alive
      alive -= 1

  def window(i):
    nonlocal alive, most
    alive += 1
    most = max(most, alive)
    return np.zeros(16, np.uint8).view(Window), np.ones(16, bool)

  scoring.score(
    lambda tokens: np.ones(tokens.shape),
    data.Lazy(100, window),
    batch_size=5,
    sharding=SHARDING,
  )

  assert 5 <= most <= 11
