"""Tests of listops.py: expressions, their values, and what a guess scores."""

import re

import numpy as np
import pytest
from helpers.errors import refused
from helpers.small_data import source_of

from sparse_transformer import data
from sparse_transformer.data.listops import SYMBOLS, example


def text_of(symbols):
  return " ".join(SYMBOLS[x] for x in symbols)


def value_of(text):
  """The value of an expression: innermost operations first."""

  def evaluate(match):
    operator, arguments = match.groups()
    values = sorted(map(int, arguments.split()))
    half = len(values) // 2
    if operator == "MIN":
      return str(values[0])
    if operator == "MAX":
      return str(values[-1])
    if operator == "SM":
      return str(sum(values) % 10)
    assert operator == "MED"
    if len(values) % 2:
      return str(values[half])
    return str((values[half - 1] + values[half]) // 2)

  while "[" in text:
    text, count = re.subn(r"\[(\w+)((?: \d)+) \]", evaluate, text)
    assert count
  return int(text)


def sizes_of(text):
  """Depth of the tree, and numbers of arguments of its operations."""
  counts = [0]
  depth = 1
  found = []
  for symbol in text.split():
    if symbol == "]":
      found.append(counts.pop())
      continue
    counts[-1] += 1
    depth = max(depth, len(counts))
    if symbol.startswith("["):
      counts.append(0)

  assert counts == [1]
  return depth, found


@pytest.mark.parametrize(
  "least, most, number",
  [
    (500, 2000, 20),
    (20, 60, 300),
  ],
)
def test_label_is_the_value_of_an_expression_within_bounds(least, most, number):
  assert value_of("[SM 9 [MAX 2 7 5 ] [MIN 3 [MED 8 4 6 ] ] 4 ]") == 3
  assert value_of("[MED 9 1 2 4 ]") == 3

  depths = set()
  counts = set()
  labels = set()
  for i in range(number):
    symbols, label = example(least, most, "train", i)
    assert symbols.dtype == np.uint8
    assert symbols.min() > 0  # which is padding
    assert least <= len(symbols) <= most
    assert value_of(text_of(symbols)) == label
    depth, of_example = sizes_of(text_of(symbols))
    depths.add(depth)
    counts.update(of_example)
    labels.add(label)

  assert counts == {*range(2, 11)}
  assert max(depths) == 10 if least == 500 else len(labels) == 10


def test_operations_and_their_arguments_are_drawn_evenly():
  operators = np.zeros(16, int)
  symbols = np.zeros(16, int)
  arguments = np.zeros(11, int)  # how many operations have so many
  for i in range(1000):
    of_example, _ = example(2, 2000, "test", i)
    operators[of_example[0]] += 1
    np.add.at(symbols, of_example, 1)
    _, numbers = sizes_of(text_of(of_example))
    np.add.at(arguments, numbers, 1)

  assert deviation(operators[11:15]) < 0.2
  assert deviation(symbols[1:11]) < 0.1
  assert deviation(arguments[2:]) < 1


def deviation(counts):
  """The largest one from the mean, as a share of it."""
  return abs(counts / counts.mean() - 1).max()


def test_examples_are_a_function_of_split_and_index():
  # They are the same in every version.
  symbols, label = example(6, 12, "test", 2)
  assert text_of(symbols) == "[MIN 2 0 [SM 0 3 5 0 ] 3 3 ]"
  assert label == 0

  texts = set()
  for split in data.SPLITS:
    for i in (0, 1):
      symbols, _ = example(20, 60, split, i)
      texts.add(bytes(symbols))
  assert len(texts) == 6


def test_source_has_rows_with_labels():
  source = source_of("listops")
  assert source.vocab_size == len(SYMBOLS)
  assert len(source.classes) == 10

  for split, number in zip(data.SPLITS, (9, 3, 3), strict=True):
    rows = source.examples(split)
    assert len(rows) == number
    for i, (*symbols, label, count) in enumerate(rows):
      text = text_of(symbols)
      assert count == len(text.split())
      assert value_of(text) == label
      assert label == source.load()[split][i][1]

  other = source_of("listops", length=24)

  assert source.digest() != other.digest()


def test_bounds_that_no_expression_has_are_an_error():
  with refused("none of 50 .* 2 to 3 symbols"):
    example(2, 3, "train", 0, draws=50)
