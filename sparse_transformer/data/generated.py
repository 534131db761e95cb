"""Generated data of known optimum that test how far back a network sees."""

import functools
import math

import numpy as np

from sparse_transformer.data.sources import ConfigDict, Images, register

# About how many symbols a split has: 64 sequences of 4,096 are validated.
SIZES = {"train": 2**22, "validation": 2**18, "test": 2**18}


@register("repeat", reads_path=False)
def repeat(config: ConfigDict) -> Images:
  """A block of random symbols, and copies of it to the end of the sequence.

  A symbol of a copy is drawn anew with probability `noise`. Given the block,
  the symbols of the copies are independent, so that the optimum is exact.
  """
  n = config.length
  period = config.period
  symbols = config.symbols
  if period >= n:
    raise ValueError(f"data.{period=} must be less than data.length={n}")

  def generate(random, number):
    drawn = random.randint(symbols, size=(number, n), dtype=np.uint8)
    # `noise` draws a symbol anew, which may be the same one by chance.
    is_copy = random.rand(number, n) >= config.noise
    is_copy[:, :period] = False
    copied = drawn[:, np.arange(n) % period]
    return np.where(is_copy, copied, drawn)

  # The probability that a copy is a given one of the other symbols.
  other = config.noise / symbols
  same = 1 - (symbols - 1) * other
  entropy = -same * math.log2(same)
  if other:
    entropy -= (symbols - 1) * other * math.log2(other)
  # The block costs log2(symbols) each; a symbol of a copy, the entropy.
  bits = period * math.log2(symbols) + (n - period) * entropy
  return _source(config, symbols, bits, generate)


@register("recall", reads_path=False)
def recall(config: ConfigDict) -> Images:
  """Pairs of key and value; blanks, 0; each key again, answered by its value.

  Multi-query associative recall (Arora et al. 2023, arXiv 2312.04927), with all
  keys in random orders.
  """
  n = config.length
  pairs = config.pairs
  size = 2 * pairs  # of the pairs, and of the questions with answers
  if 2 * size > n:
    raise ValueError(f"data.{pairs=} must be at most {n // 4}, data.length / 4")

  def generate(random, number):
    sequences = np.zeros((number, n), np.uint8)
    values = random.randint(pairs, size=(number, pairs))  # by key
    told = sequences[:, :size]
    asked = sequences[:, n - size :]

    for part in told, asked:
      # Sorting random numbers gives a random permutation in each row.
      order = random.rand(number, pairs)
      keys = order.argsort(axis=1)
      answers = np.take_along_axis(values, keys, axis=1)
      part[:, ::2] = 1 + keys
      part[:, 1::2] = 1 + pairs + answers
    return sequences

  # Both orders of keys and all values are random: log2(pairs!) bits for each
  # order, log2(pairs) for each value. Answers cost nothing.
  bits_of_order = math.lgamma(pairs + 1) / math.log(2)
  bits = 2 * bits_of_order + pairs * math.log2(pairs)
  return _source(config, 1 + 2 * pairs, bits, generate)


def _source(config, vocab_size, bits, generate):
  """A source of gray images of generated symbols.

  Args:
    config: the `data` group of a config.
    vocab_size: the number of symbols.
    bits: what the best predictor loses on a sequence.
    generate: maps a random state and a number to uint8 [number, length].
  """
  n = config.length
  columns = config.columns
  if n % columns:
    raise ValueError(
      f"data.length={n} must be a multiple of data.{columns=} for"
      f" data.name={config.name}"
    )

  shape = n // columns, columns, 1

  @functools.cache
  def load():
    splits = {}
    # A seed per split: validation must not repeat training.
    for seed, (split, size) in enumerate(SIZES.items()):
      sequences = generate(np.random.RandomState(seed), max(1, size // n))
      splits[split] = sequences.reshape(-1, *shape)
    return splits

  return Images(
    shape=shape,
    vocab_size=vocab_size,
    load=load,
    unit="bits/symbol",
    optimum=bits / n,
  )
