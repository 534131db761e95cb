"""Generated data that test how far back a network sees. Optima are known."""

import functools
import math

import numpy as np

from sparse_transformer.data.sources import ConfigDict, Images, register

# The approximate number of symbols in each split, such as 64 validation
# sequences of 4,096 symbols.
SIZES = {"train": 2**22, "validation": 2**18, "test": 2**18}


@register("repeat", reads_path=False)
def repeat(config: ConfigDict) -> Images:
  """A block of random symbols, repeated to the end of the sequence.

  With probability `noise`, a symbol of a copy is replaced by a random symbol.
  Given the block, the symbols of all copies are independent, so the optimal
  loss is known exactly.
  """
  n = config.length
  period = config.period
  symbols = config.symbols
  if period >= n:
    raise ValueError(f"data.{period=} must be less than data.length={n}")

  def generate(random, number):
    drawn = random.randint(symbols, size=(number, n), dtype=np.uint8)
    # A random symbol may equal the original one by chance.
    is_copy = random.rand(number, n) >= config.noise
    is_copy[:, :period] = False
    copied = drawn[:, np.arange(n) % period]
    return np.where(is_copy, copied, drawn)

  # The probability that a copy is a particular other symbol.
  other = config.noise / symbols
  same = 1 - (symbols - 1) * other
  entropy = -same * math.log2(same)
  if other:
    entropy -= (symbols - 1) * other * math.log2(other)
  # Each symbol of the block costs log2(symbols) bits, and each symbol of a copy
  # costs the entropy.
  bits = period * math.log2(symbols) + (n - period) * entropy
  return _source(config, symbols, bits, generate)


@register("recall", reads_path=False)
def recall(config: ConfigDict) -> Images:
  """Key-value pairs, then blanks (0), then each key again with its value.

  This is multi-query associative recall (Arora et al. 2023, arXiv 2312.04927).
  Every key is queried once. The order of the queries is random, and does not
  depend on the order of the pairs.
  """
  n = config.length
  pairs = config.pairs
  size = 2 * pairs  # symbols of all pairs, and of all questions with answers
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

  # Both orders of keys and all values are random, so each order costs
  # log2(pairs!) bits, and each value costs log2(pairs) bits. Answers cost
  # nothing, because they are determined.
  bits_of_order = math.lgamma(pairs + 1) / math.log(2)
  bits = 2 * bits_of_order + pairs * math.log2(pairs)
  return _source(config, 1 + 2 * pairs, bits, generate)


def _source(config, vocab_size, bits, generate):
  """Returns a source of gray images of generated symbols.

  Args:
    config: the `data` group of a config.
    vocab_size: the number of distinct symbols.
    bits: the expected loss of the optimal predictor, in bits per sequence.
    generate: a function (random state, number of sequences) -> uint8 [number,
      length].
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
    # Use a different seed for each split, so that validation data differ from
    # training data.
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
