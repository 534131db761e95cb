"""Tests of dropout: its masks, their rates, and that they are independent."""

import itertools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks

from sparse_transformer import model
from sparse_transformer.model.dropout import TOLERANCE, WORD, draw, drop, share

# More than a word of positions, and not a multiple of it.
SHAPE = 2, WORD + 5, 3


def is_dropped(key, rate, shape):
  """The mask of a key, as NumPy bool."""
  dropped = drop(jnp.ones(shape), draw(key, shape, rate), rate)
  return np.asarray(dropped == 0)


# Rates.


@pytest.mark.parametrize(
  "rate, expected",
  [
    (0.0, Fraction(0)),
    (0.25, Fraction(1, 4)),
    (0.4, Fraction(51, 128)),
    (0.1, Fraction(51, 512)),
    (0.005, Fraction(41, 8192)),
  ],
)
def test_share_is_the_rate_in_few_binary_digits(rate, expected):
  assert share(rate) == expected


@pytest.mark.parametrize("rate", [1e-6, 0.01, 0.3, 1 / 3, 0.5, 0.9, 1 - 1e-6])
def test_share_is_close_to_the_rate_and_to_that_of_kept_values(rate):
  assert share(rate) == pytest.approx(rate, rel=float(TOLERANCE))
  assert 1 - share(rate) == pytest.approx(1 - rate, rel=float(TOLERANCE))


@pytest.mark.parametrize("rate", [0.005, 0.1, 0.25, 0.4, 0.5, 0.9])
def test_share_of_values_is_dropped(rate):
  mask = is_dropped(jax.random.key(1), rate, (4, 512, 64))
  expected = float(share(rate))
  deviation = np.sqrt(expected * (1 - expected) / mask.size)

  assert abs(mask.mean() - expected) < 4 * deviation


# Values.


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.4, 0.9])
def test_value_is_dropped_if_its_random_number_is_less_than_the_share(rate):
  """The plainest code: a number for each value, compared with the share."""
  key = jax.random.key(0)
  exact = share(rate)
  digits = exact.denominator.bit_length() - 1
  batch, length, width = SHAPE
  words = jax.random.bits(key, (digits, batch, 2, width), jnp.uint32)

  expected = np.zeros(SHAPE, bool)
  for i, t, d in itertools.product(*map(range, SHAPE)):
    number = 0
    for place in range(digits):
      word = int(words[place, i, t // WORD, d])
      is_zero = word >> (t % WORD) & 1
      number += (1 - is_zero) << place
    expected[i, t, d] = number < exact.numerator

  np.testing.assert_array_equal(is_dropped(key, rate, SHAPE), expected)


def test_kept_values_are_divided_by_their_share_and_so_are_gradients():
  x = jax.random.normal(jax.random.key(1), SHAPE)
  key = jax.random.key(2)
  mask = is_dropped(key, 0.3, SHAPE)
  factor = np.where(mask, 0, 1 / float(1 - share(0.3)))

  def dropout(x):
    return drop(x, draw(key, x.shape, 0.3), 0.3)

  np.testing.assert_allclose(dropout(x), factor * x, rtol=1e-6)
  # It is linear: all its derivatives are this factor.
  _, forward = jax.jvp(dropout, (x,), (x,))
  np.testing.assert_allclose(forward, factor * x, rtol=1e-6)
  _, backward = jax.vjp(dropout, x)
  np.testing.assert_allclose(backward(x)[0], factor * x, rtol=1e-6)


@pytest.mark.parametrize("length", [1, WORD - 1, WORD, WORD + 1])
def test_any_length_can_be_dropped(length):
  mask = is_dropped(jax.random.key(0), 0.5, (1, length, 64))
  assert mask.shape == (1, length, 64)
  assert 0.2 < mask.mean() < 0.8


# Independence.


def correlation(first, second):
  """Of two masks, in deviations of that of independent ones."""
  first, second = (x.ravel() - x.mean() for x in (first, second))
  deviations = first.std() * second.std()
  return np.sqrt(first.size) * (first * second).mean() / deviations


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.4])
def test_values_of_a_mask_are_independent(rate):
  """All bits of a word, and neighbors of other words, features, sequences."""
  mask = is_dropped(jax.random.key(3), rate, (16, 4 * WORD, 64))
  by_bit = mask.reshape(16, 4, WORD, 64)
  found = [
    correlation(by_bit[:, :, i], by_bit[:, :, j])
    for i, j in itertools.combinations(range(WORD), 2)
  ]
  for axis, shift in itertools.product(range(3), (1, 2, 5)):
    found.append(correlation(mask, np.roll(mask, shift, axis)))

  # Of about 500 normal numbers, the largest is below 5 but for 1 in 3,000.
  assert np.abs(found).max() < 5
  # All are as large as those of independent masks, and none are smaller.
  assert np.std(found) == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("rate", [0.1, 0.25, 0.4])
def test_masks_of_steps_layers_and_branches_are_independent(rate):
  """With the keys of `train_step`, which the network splits."""
  masks = []
  shape = 4, 128, 32
  for step in range(3):
    seed = jax.random.fold_in(jax.random.key(0), step)
    (of_batch,) = jax.random.split(seed, 1)
    for of_layer in jax.random.split(of_batch, 3):
      for words in draw(of_layer, (2, *shape), rate):
        masks.append(np.asarray(drop(jnp.ones(shape), words, rate) == 0))

  pairs = itertools.combinations(masks, 2)
  found = [correlation(*pair) for pair in pairs]
  assert np.abs(found).max() < 5
  assert np.std(found) == pytest.approx(1, rel=0.25)


def test_words_are_drawn_once_and_not_for_each_of_their_values():
  lowered = jax.jit(draw, static_argnums=(1, 2)).lower(
    jax.random.key(0),
    SHAPE,
    0.25,
  )
  assert "optimization_barrier" in lowered.as_text()


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_network_draws_only_with_a_rate(rate):
  config = networks.config(dropout=rate)
  params = networks.random_params(config)
  symbols = networks.tokens(config)
  apply = model.make_apply(config)
  program = jax.make_jaxpr(apply)(params, symbols, jax.random.key(0))

  equations = networks.equations(program.jaxpr)
  drawn = [x for x in equations if x.primitive.name == "random_bits"]
  assert len(drawn) == (2 if rate else 0)  # of two layers in the scan's body
