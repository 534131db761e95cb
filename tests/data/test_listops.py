"""Tests of listops.py: expressions, their values, and what a guess scores."""

import re

import numpy as np
import pytest
import small_data

from sparse_transformer import data
from sparse_transformer.data.listops import SYMBOLS, ListOps

SMALL = dict(sizes=(500, 20, 20), min_length=20, length=60, max_depth=5)


def text_of(symbols):
  return " ".join(SYMBOLS[x] for x in symbols)


def value_of(text):
  """The value of an expression: innermost operations first."""

  def evaluate(match):
    values = sorted(map(int, match[2].split()))
    half = len(values) // 2
    middle = sum(values[half - 1 : half + 1]) // 2
    return {
      "MIN": str(values[0]),
      "MAX": str(values[-1]),
      "MED": str(values[half] if len(values) % 2 else middle),
      "SM": str(sum(values))[-1],
    }[match[1]]

  while "[" in text:
    text, count = re.subn(r"\[(\w+)((?: \d)+) \]", evaluate, text)
    assert count
  return int(text)


def sizes_of(text):
  """Depth of the tree, and numbers of arguments of its operations."""
  counts, depth, found = [0], 1, []
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
  "text, value",
  [
    ("[MED 1 2 ]", 1),
    ("[MED 9 1 2 4 ]", 3),
    ("[SM 9 [MAX 2 7 5 ] [MIN 3 [MED 8 4 6 ] ] 4 ]", 3),
  ],
)
def test_evaluator_of_these_tests(text, value):
  assert value_of(text) == value


@pytest.mark.parametrize("settings, number", [({}, 12), (SMALL, 300)])
def test_label_is_the_value_of_an_expression_within_bounds(settings, number):
  source = ListOps(**settings)
  depths, counts, labels = set(), set(), set()
  for i in range(number):
    symbols, label = source.example("train", i)
    assert symbols.dtype == np.uint8 and symbols.min() > 0  # padding
    assert source.min_length <= len(symbols) <= source.length
    assert value_of(text_of(symbols)) == label
    depth, args = sizes_of(text_of(symbols))
    depths.add(depth)
    counts |= {*args}
    labels.add(label)
  assert max(depths) == source.max_depth
  assert counts == {*range(2, 11)} and (number < 100 or len(labels) == 10)


def test_operations_and_their_arguments_are_drawn_evenly():
  source = ListOps(sizes=(1, 1, 1), min_length=4, length=2000, max_depth=2)
  examples = [source.example("test", i)[0] for i in range(2000)]
  operators = np.bincount([x[0] for x in examples], minlength=16)[11:15]
  assert abs(operators / 500 - 1).max() < 0.15
  digits = np.bincount(np.concatenate([x[1:-1] for x in examples]))[1:11]
  assert abs(digits / digits.mean() - 1).max() < 0.15
  # From 2 to 10 arguments.
  lengths = np.bincount([len(x) - 2 for x in examples], minlength=11)[2:]
  assert len(lengths) == 9 and abs(lengths * 9 / 2000 - 1).max() < 0.3


def test_examples_are_a_function_of_seed_split_and_index():
  # Those of a seed must stay what they were when a network was trained.
  tiny = ListOps(min_length=6, length=12, max_depth=3)
  symbols, label = tiny.example("test", 2)
  assert text_of(symbols) == "[MAX 7 8 7 [MED 2 0 3 9 ] 0 ]" and label == 8
  splits = ListOps(**SMALL).splits()
  assert [len(x) for x in splits.values()] == [500, 20, 20]
  texts = [bytes(x) for split in splits.values() for x, _ in split]
  assert len({*texts}) == len(texts)
  np.testing.assert_array_equal(
    splits["test"][7][0], ListOps(**SMALL).example("test", 7)[0]
  )
  assert bytes(ListOps(seed=1, **SMALL).example("train", 0)[0]) != texts[0]


def test_root_and_its_digits_tell_part_of_the_value():
  examples = [ListOps(**SMALL).example("train", i) for i in range(1000)]
  labels = np.array([label for _, label in examples])
  roots = np.array([symbols[0] for symbols, _ in examples])
  majority = np.bincount(labels).max() / 1000
  by_root = sum(np.bincount(labels[roots == x]).max() for x in {*roots}) / 1000
  assert 0.12 < majority < 0.25 and majority + 0.1 < by_root < 0.5


@pytest.mark.parametrize(
  "settings, message",
  [
    (dict(sizes=(5, 0, 5)), r"sizes=\(5, 0, 5\) must be three integers at"),
    (dict(min_length=9, length=8), "min_length=9 must be .* length=8"),
    (dict(min_length=0), "min_length=0 must be at least 1"),
    (dict(max_depth=0), "max_depth=0 must be between 1 and 100"),
    (dict(max_args=1), "max_args=1 must be between 2 and 1,000"),
    (dict(max_depth=2), "none of 20,000 .* 500 to 2,000 .* use wider bounds"),
  ],
)
def test_error_about_bounds_is_one_line(settings, message):
  with pytest.raises(ValueError, match=message) as error:
    ListOps(**settings)
  assert "\n" not in str(error.value)


def test_source_has_rows_with_labels():
  source = data.source(small_data.config("listops"))
  assert source.vocab_size == len(SYMBOLS) and len(source.classes) == 10
  for split, number in zip(data.SPLITS, (9, 3, 3), strict=True):
    rows = source.examples(split)
    assert len(rows) == number
    for i, (*symbols, label, count) in enumerate(rows):
      text = text_of(symbols)
      assert count == len(text.split()) and value_of(text) == label
      assert label == source.load()[split][i][1]
  assert (
    source.digest()
    != data.source(small_data.config("listops", min_length=9)).digest()
  )


def test_source_rejects_a_path_and_bounds_that_exclude_each_other():
  with pytest.raises(ValueError, match="data.path=x is not read"):
    data.source(small_data.config("listops", "x"))
  with pytest.raises(ValueError, match="min_length=17 must be .* length=16"):
    data.source(small_data.config("listops", min_length=17))
