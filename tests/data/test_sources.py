"""Laws of all registered sources, and of their names."""

import re
import zlib

import hypothesis
import numpy as np
import pytest
from helpers import small_data
from helpers.errors import refused
from helpers.small_data import source_of
from hypothesis import strategies

from sparse_transformer import data

LABELLED = {"cifar10_gray", "labelled", "listops"}  # have other tests
UNLABELLED = [name for name in data.SOURCES if name not in LABELLED]


@pytest.fixture(scope="module", params=UNLABELLED)
def config(request, tmp_path_factory):
  """The config of each source in turn, with small data."""
  folder = tmp_path_factory.mktemp(request.param)
  with pytest.MonkeyPatch.context() as patch:
    yield small_data.write(request.param, folder, patch)


@pytest.fixture(scope="module")
def source(config):
  source = data.source(config)
  try:
    source.load()
  except FileNotFoundError as error:
    factory = data.SOURCES[config.name]
    if factory.__module__.startswith("sparse_transformer."):
      raise
    pytest.skip(str(error))  # a source of yours without small data

  return source


def check_windows(source, split, min_context):
  """Windows score each symbol of a split once, with its context."""
  text = symbols(source, split)
  count = np.zeros(len(text), int)
  for i, (tokens, scored) in enumerate(source.windows(split, min_context)):
    assert tokens.dtype == text.dtype
    assert scored.dtype == bool
    first = i * (source.length - min_context)
    here = slice(first, first + source.length)
    size = len(text[here])
    np.testing.assert_array_equal(tokens[:size], text[here])
    assert not tokens[size:].any()  # padding
    assert not scored[size:].any()
    assert i == 0 or not scored[:min_context].any()
    count[here] += scored[:size]

  np.testing.assert_array_equal(count, 1)


def symbols(source, split):
  if isinstance(source, data.Images):
    return np.concatenate(list(source.examples(split)))
  return source.load()[split]


# Laws of all sources.


def test_geometry_and_vocabulary_fit_the_data(source, config):
  # Images of any size are the exception: the first one has to be there.
  path = config.path and "/nowhere"
  path = config.path if config.name == "images" else path
  without_data = source_of(config.name, path)
  for name in ("shape", "length", "vocab_size", "unit"):
    assert getattr(without_data, name) == getattr(source, name)
  assert 0 <= np.prod(source.shape) - source.length < source.shape[1]

  dtype = np.min_scalar_type(source.vocab_size - 1)
  for split in data.SPLITS:
    example = source.examples(split)[0]
    assert example.shape == (source.length,)
    assert example.dtype == dtype

  assert symbols(source, "test").max() < source.vocab_size


def test_windows_score_each_symbol_of_a_source_once(source):
  check_windows(source, "test", 0)
  if isinstance(source, data.Stream):
    for min_context in (1, source.length // 2, source.length - 1):
      check_windows(source, "test", min_context)


def test_examples_are_a_lazy_sequence(source):
  examples = source.examples("test")
  assert isinstance(examples, data.Lazy)
  in_order = np.stack(list(examples))
  if isinstance(source, data.Stream):  # they start at each symbol
    text = source.load()["test"]
    expected = np.lib.stride_tricks.sliding_window_view(text, source.length)
    np.testing.assert_array_equal(in_order, expected)

  assert len(in_order) == len(examples)
  np.testing.assert_array_equal(examples[-1], in_order[-1])
  np.testing.assert_array_equal(examples[np.int64(1)], in_order[1])
  for beyond in (len(examples), -len(examples) - 1):
    with pytest.raises(IndexError):
      examples[beyond]


def test_batches_of_a_source_are_a_function_of_seed_and_step(source):
  examples = source.examples("test")
  indices = range(len(examples))
  batches = data.batches(examples, 4, seed=3)
  numbers = data.batches(indices, 4, seed=3)
  others = data.batches(indices, 4, seed=4)
  is_other = []
  for step in (7, 0, 10**9):  # in any order, without an end
    batch = np.stack([examples[i] for i in numbers[step]])
    np.testing.assert_array_equal(batches[step], batch)
    is_other.append((numbers[step] != others[step]).any())

  assert any(is_other)


def test_digest_depends_on_the_data_only(source, config):
  digest = source.digest()
  assert digest == data.source(config).digest()
  assert re.fullmatch("[0-9a-f]{8}", digest["crc32"])

  if isinstance(source, data.Images):
    sizes = [len(source.examples(split)) for split in data.SPLITS]
    assert digest["images"] == sizes[0]
  else:
    sizes = [len(source.load()[split]) for split in data.SPLITS]
    crc32 = f"{zlib.crc32(small_data.contents(source)):08x}"
    assert digest["symbols"] == sum(sizes)
    assert digest["crc32"] == crc32

  assert digest["splits"] == sizes


def test_unknown_split_is_an_error_that_lists_the_known_ones(source):
  for method in (source.examples, source.windows):
    with refused("'dev'; known: train, validation,"):
      method("dev")


# The same for streams of any size.


def stream(size, length):
  split = np.arange(1, size + 1, dtype=np.uint8)
  return data.Stream(length, 4, lambda: dict.fromkeys(data.SPLITS, split))


@hypothesis.given(
  size=strategies.integers(1, 60),
  length=strategies.integers(1, 20),
  min_context=strategies.integers(0, 19),
)
@hypothesis.settings(deadline=None)
def test_windows_of_any_size_score_each_symbol_once(size, length, min_context):
  check_windows(stream(size, length), "test", min_context % length)


def test_split_shorter_than_a_window_is_not_trained_on():
  with refused(r"train has 5 symbols.*length=13.*use"):
    stream(5, 13).examples("train")


# Batches.


@pytest.mark.parametrize("batch_size", [1, 4, 10, 23])
def test_each_epoch_has_each_example_once_in_a_new_order(batch_size):
  examples = np.arange(10, dtype=np.uint8)[:, None]
  batches = data.batches(examples, batch_size, seed=0)
  steps = range(-(-30 // batch_size))
  drawn = np.concatenate([batches[step] for step in steps])[:30]
  epochs = [tuple(epoch) for epoch in drawn.reshape(3, 10)]
  assert len(set(epochs)) == 3
  for epoch in epochs:
    assert sorted(epoch) == [*range(10)]


# The names of sources.


def test_vocabularies_and_units():
  found = {}
  for name in {*UNLABELLED} - {"images"}:
    source = source_of(name)
    found.setdefault((source.vocab_size, source.unit), set()).add(name)

  assert found == {
    (17, "bits/dim"): {"digits"},
    (256, "bits/dim"): {"cifar10", "cifar10_distaug", "imagenet64"},
    (256, "bits/byte"): {"bytes", "jsonl", "stdlib", "enwik8"},
    (2**16, "bits/token"): {"tokens"},
    (27, "bits/character"): {"text8"},
    (4, "bits/base"): {"fasta"},
    (256, "bits/sample"): {"audio"},
    (7, "bits/symbol"): {"repeat", "recall"},
  }


def test_name_of_two_sources_is_an_error():
  with refused("'digits' is already registered"):
    data.register("digits")


# Labels.


@pytest.mark.parametrize(
  "size, label, phrase",
  [
    (0, 0, "0 symbols and .* must have 1 to 4 symbols"),
    (5, 0, "5 symbols and"),
    (3, -1, "label=-1; it must .* a label from 0 to 1"),
    (3, 2, "label=2; it must"),
  ],
)
def test_examples_must_fit_the_source(size, label, phrase):
  examples = [(np.ones(size, np.uint8), label)]
  source = data.Sequences(
    4, (2, 2), 7, ("a", "b"), lambda: dict.fromkeys(data.SPLITS, examples)
  )
  with refused(phrase):
    source.examples("train")[0]
