"""Tests of tokens: their files, a run on them, and its bits per byte."""

import gzip
import io
import math
import os
import tracemalloc

import numpy as np
import pytest
from helpers import runs
from helpers.errors import refused
from helpers.small_data import source_of

from sparse_transformer import data
from sparse_transformer.data import files
from sparse_transformer.model import sampling
from sparse_transformer.training import loop, metrics
from sparse_transformer.training.evaluation import samples
from sparse_transformer.training.experiment import Experiment

VOCABULARY = 50_304
RANDOM = np.random.RandomState(0)
TOKENS = RANDOM.choice(RANDOM.randint(0, 50_257, 50), 900).astype(np.uint16)
BYTES = np.random.RandomState(1).randint(0, 9, VOCABULARY)


def write(folder, tokens=TOKENS, names=("train", "val")):
  """Writes the same tokens for all splits, as nanoGPT does."""
  folder.mkdir(exist_ok=True)
  for name in names:
    tokens.astype("<u2").tofile(folder / f"{name}.bin")
  return folder


def tokens_of(path, **changes):
  return source_of("tokens", path, vocab_size=VOCABULARY, **changes)


# Files.


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_array_is_mapped_and_split_by_fractions(tmp_path, dtype):
  path = tmp_path / "x.npy"
  top = min(np.iinfo(dtype).max, 2**31 - 2)
  tokens = np.array([0, top, *range(98)], dtype)
  np.save(path, tokens)
  source = source_of("tokens", path, vocab_size=top + 1)
  parts = [source.load()[split] for split in data.SPLITS]

  assert [len(part) for part in parts] == [50, 25, 25]
  np.testing.assert_array_equal(np.concatenate(parts), tokens)
  assert {part.dtype for part in parts} == {np.dtype(dtype)}

  base = parts[0]
  while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
    base = base.base
  assert isinstance(base, np.memmap)

  np.save(path, tokens.astype(np.uint32))
  more = source_of("tokens", path, vocab_size=top + 2)
  prompts = samples.no_prompts(more, 2)
  assert prompts.dtype == np.min_scalar_type(top + 1)


@pytest.mark.parametrize("by", ["names", "fractions"])
def test_shards_are_read_as_one_array_without_a_copy(tmp_path, by, monkeypatch):
  random = np.random.RandomState(0)
  shards = []
  for i, size in enumerate((400, 1, 90, 17, 300)):
    shard = random.randint(0, VOCABULARY, size).astype(np.uint16)
    shard.tofile(tmp_path / f"train_{i:06}.bin")
    shards.append(shard)

  joined = np.concatenate(shards)
  if by == "names":
    write(tmp_path, names=["val", "test"])
    parts = dict(train=joined, validation=TOKENS, test=TOKENS)
  else:
    whole = tmp_path.with_suffix(".npy")
    np.save(whole, joined)
    parts = tokens_of(whole).load()

  monkeypatch.setattr(files, "BLOCK", 100)
  np.save(tmp_path / "token_bytes.npy", BYTES)
  source = tokens_of(tmp_path, splits=by, length=150)
  for split, tokens in parts.items():
    found = source.load()[split]
    assert len(found) == len(tokens)
    np.testing.assert_array_equal(np.asarray(found), tokens)

    examples = source.examples(split)
    assert len(examples) == len(tokens) - 149
    for i, example in enumerate(examples):
      assert type(example) is np.ndarray
      assert example.dtype == np.uint16
      np.testing.assert_array_equal(example, tokens[i : i + 150])

    alone = data.Stream(150, 4, lambda x=tokens: dict.fromkeys(data.SPLITS, x))
    for context in 0, 149:
      windows = source.windows(split, context)
      expected = alone.windows("train", context)
      for window, same in zip(windows, expected, strict=True):
        np.testing.assert_array_equal(window, same)

    for size in 1, 399, 402, len(tokens):
      assert source.num_bytes(split, size) == BYTES[tokens[:size]].sum()

  if by == "fractions":
    assert source.digest() == tokens_of(whole).digest()


def test_shards_are_mapped(tmp_path):
  for i in range(4):
    np.arange(1_000_000).astype(np.uint16).tofile(tmp_path / f"{i}.bin")
  tracemalloc.start()
  try:
    source = source_of("tokens", tmp_path)
    between = source.examples("train")[999_996]
    last = np.arange(999_996, 1_000_000) % 2**16
    assert between[:6].tolist() == [*last, 0, 1]
    assert source.digest()["splits"] == [2_000_000, 1_000_000, 1_000_000]
    peak = tracemalloc.get_traced_memory()[1]
  finally:
    tracemalloc.stop()

  assert peak < 6_000_000  # a copy has 8,000,000 bytes


def test_shard_that_becomes_shorter_is_an_error(tmp_path):
  for i in range(2):
    np.ones(30_000, np.uint16).tofile(tmp_path / f"{i}.bin")
  source = source_of("tokens", tmp_path, length=64)
  windows = source.windows("train")
  assert len([*windows]) == 469
  os.truncate(tmp_path / "0.bin", 4096)
  with pytest.raises(OSError, match="0.bin has become shorter"):
    list(windows)


WORDS = np.arange(4000)


def npy(array):
  """The content of a NumPy file."""
  file = io.BytesIO()
  np.save(file, array)
  return file.getvalue()


def llm_c(*numbers):
  """What a file of llm.c begins with."""
  return np.array(numbers, "<i4").tobytes().ljust(1024, b"\0")


@pytest.mark.parametrize(
  "content, phrase",
  [
    (WORDS.astype("<u4"), "32- or 64-bit tokens"),
    (WORDS.astype(">u4"), "32- or 64-bit tokens"),
    (WORDS.astype("<i8"), "32- or 64-bit tokens"),
    # Token numbers up to 128,000: some need more than 16 bits.
    ((WORDS * 32).astype("<u4"), "32- or 64-bit tokens"),
    (
      llm_c(20240520, 1, 4000) + WORDS.astype("<u2").tobytes(),
      "llm.c's header of 1,024 bytes",
    ),
    (
      llm_c(20240801, 7, 4000) + WORDS.astype("<u4").tobytes(),
      "llm.c's header",
    ),
    (b"the quick brown fox\n" * 9, "contains text"),
    (b"PK\x03\x04" + bytes(99) + b"!", "zip data"),
    (b"MMIDIDX\0\0" + bytes(98), "Megatron's index"),
    ("schöne Wörter. ".encode() * 9, "contains text"),
    (gzip.compress(b"text", mtime=0), "gzip data"),
    # Of four symbols, half of them 0; after padding; padded by half.
    (WORDS % 4, "32- or 64-bit tokens"),
    (np.append(0 * WORDS, WORDS).astype("<u4"), "32- or 64-bit tokens"),
    (np.where(WORDS % 2, 0, WORDS), "32- or 64-bit tokens"),
    (npy(WORDS), "a NumPy array"),
    (b"\1" * 4001, "not a multiple of the data-type size"),
    (b"", "empty file"),
    # uint16 of the other byte order; bytes; the first one that is too large.
    (WORDS.astype(">u2"), r"token 65294 \(uint16\) at index 3839 is not"),
    (bytes([200]) * 90, r"token 51400 \(uint16\) at index 0 is not"),
    (np.append(TOKENS, VOCABULARY).astype("<u2"), "token 50304 .* 900 is not"),
  ],
)
def test_file_of_other_than_uint16_is_refused(tmp_path, content, phrase):
  (tmp_path / "x.bin").write_bytes(bytes(content))
  with refused(f"x.bin.*{phrase}"):
    tokens_of(tmp_path / "x.bin").load()


RANDOM_TOKENS = np.random.RandomState(0).randint(0, VOCABULARY, 400)


@pytest.mark.parametrize(
  "tokens",
  [
    np.zeros(400),
    np.random.RandomState(0).choice(2, 400),
    np.random.RandomState(0).choice(27, 41),
    RANDOM_TOKENS,
    [7] * 99 + [0],
    [258],
    np.append(np.arange(8), np.zeros(1016)),  # a short document, padded
    np.where(np.arange(400) % 3, RANDOM_TOKENS, 0),
  ],
)
def test_file_of_uint16_is_not_refused(tmp_path, tokens):
  np.array(tokens, "<u2").tofile(tmp_path / "x.bin")
  (found,) = tokens_of(tmp_path).codec.read(tmp_path / "x.bin")
  np.testing.assert_array_equal(found, tokens)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_vocabulary_that_the_dtype_cannot_hold_is_refused(
  tmp_path, dtype, suffix
):
  path = tmp_path / f"x.{suffix}"
  tokens = np.arange(1, 200, dtype=dtype)
  if suffix == "npy":
    np.save(path, tokens)
  else:
    tokens.astype("<u2").tofile(path)
    dtype = np.uint16

  fits = np.iinfo(dtype).max + 1
  found = source_of("tokens", path, vocab_size=fits).load()

  np.testing.assert_array_equal(np.concatenate([*found.values()]), tokens)
  message = (
    f"x.{suffix} contains {np.dtype(dtype)}, which cannot .*={fits + 1};"
  )
  with refused(message):
    source_of("tokens", path, vocab_size=fits + 1).load()


@pytest.mark.parametrize(
  "tokens",
  [
    WORDS.astype(np.int64),
    WORDS.astype(">u2"),
    WORDS.astype(np.float32),
    WORDS > 7,
    WORDS.astype(np.uint16).reshape(1, -1),
    np.array(7, np.uint16),
  ],
  ids=lambda x: f"{x.dtype} {x.shape}",
)
def test_array_that_is_no_row_of_tokens_is_refused(tmp_path, tokens):
  np.save(tmp_path / "x.NPY", tokens)
  (tmp_path / "x.NPY.npy").replace(tmp_path / "x.NPY")
  with refused("x.NPY contains .*; tokens must be uint8"):
    tokens_of(tmp_path / "x.NPY").load()


def test_array_whose_file_holds_more_is_refused(tmp_path):
  path = tmp_path / "x.npy"
  array = npy(TOKENS)
  path.write_bytes(array + array)
  with refused("x.npy .*: 1,928 bytes follow its array"):
    tokens_of(path).load()
  shape = b"(900,), }         "
  assert shape in array
  call = array.replace(shape, b"(np.int64(900),), }")
  path.write_bytes(call[:128] + call[129:])
  with refused("header has a call, such as np.int64"):
    tokens_of(path).load()


@pytest.mark.parametrize(
  "table",
  [
    np.ones(VOCABULARY),
    np.ones(VOCABULARY, bool),
    np.ones(VOCABULARY - 1, int),
    -np.ones(VOCABULARY, int),
  ],
  ids=["float", "bool", "short", "negative"],
)
def test_table_of_other_than_numbers_of_bytes_is_refused(tmp_path, table):
  write(tmp_path)
  np.save(tmp_path / "token_bytes.npy", table)
  with refused("token_bytes.npy contains .*; it must"):
    tokens_of(tmp_path).load()


def test_table_of_another_byte_order_counts_the_same_bytes(tmp_path):
  write(tmp_path)
  np.save(tmp_path / "token_bytes.npy", BYTES.astype(">i2"))
  found = tokens_of(tmp_path).num_bytes("train", 900)
  assert found == BYTES[TOKENS].sum()


@pytest.mark.parametrize(
  "words", ["the fox", "1 2.5", "-1", f"{VOCABULARY}", "9" * 30, "9" * 9999]
)
def test_prompt_that_is_no_tokens_is_rejected(words, tmp_path):
  codec = tokens_of(tmp_path).codec
  path = tmp_path / "prompt"
  with refused(f"{path}"):
    codec.decode(words.encode(), path)


# A run.


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run on uint16 tokens below 50,304, in the format of nanoGPT."""
  folder = write(tmp_path_factory.mktemp("tokens") / "gpt")
  write(folder, TOKENS[:50], ["test"])
  np.save(folder / "token_bytes.npy", BYTES)
  settings = {
    "data.name": "tokens",
    "data.vocab_size": VOCABULARY,
    "optimizer.learning_rate": 0.1,
    "checkpoint.every": 0,
  }
  loop.train(runs.text(folder, **settings), folder.parent / "run")
  return folder.parent / "run"


@pytest.mark.soak
def test_run_learns_which_tokens_occur(run):
  lines = metrics.read(run)
  bits = [line["bits_per_dim"] for line in lines if "bits_per_dim" in line]
  equal = math.log2(VOCABULARY)  # for all tokens
  assert bits[0] == pytest.approx(equal, abs=1e-4)
  assert bits[-1] < 15


def test_bits_per_byte_is_bits_over_bytes(run, capfd):
  total = BYTES[TOKENS[:50]].sum()
  for found in runs.scores(capfd, run, "--min_context=0,7"):
    assert found["unit"] == "bits/token"
    assert found["tokens"] == 50
    bits = 50 * found["bits_per_dim"]
    assert found["bits_per_byte"] == pytest.approx(bits / total, rel=1e-12)

  page = runs.report(run)

  assert f"{found['bits_per_byte']:.4f} bits/byte" in page
  assert "bits/token" in page
  assert "bits/dim" not in page


def test_samples_continue_a_prompt_of_tokens(run, tmp_path):
  (tmp_path / "prompt").write_text("50256 7\n")
  prompt = f"--prompt=@{tmp_path / 'prompt'}"
  for words in [prompt], []:
    words += [f"--workdir={run}", "--num=2"]
    assert runs.command("sparse_transformer/sample.py", *words) == 0
    rows = np.loadtxt(run / "samples.txt", int)
    assert rows.shape == (2, 32)
    assert 2**8 < rows.max() < VOCABULARY
    begins_with_prompt = rows[:, :2] == [50_256, 7]
    assert begins_with_prompt.all() == (prompt in words)


def test_tokens_beyond_16_bits_are_trained_on_and_scored(tmp_path):
  tokens = TOKENS.astype(np.uint32) % 1000 + 2**16
  np.save(tmp_path / "x.npy", tokens)
  changes = {
    "data.name": "tokens",
    "data.vocab_size": 2**16 + 1000,
    "model.width": 2,
  }
  experiment = Experiment(runs.text(tmp_path / "x.npy", **changes))
  batch = np.asarray(experiment.batch(0))
  assert batch.dtype == np.uint32
  row = int(experiment.numbers[0][0])
  np.testing.assert_array_equal(batch[0], tokens[row : row + 32])

  # The logit of one token is raised, and its loss alone is lower.
  params = experiment.init().params
  wanted = batch[0, 5]
  kernel = np.zeros(params["logits"]["kernel"].shape, np.float32)
  kernel[:, wanted] = 1
  params["logits"]["kernel"] = kernel
  params["norm"]["bias"] = np.ones_like(params["norm"]["bias"])
  nats = np.asarray(experiment.losses(params, batch))
  is_wanted = batch == wanted
  assert is_wanted.any()
  assert nats[is_wanted].max() < nats[~is_wanted].min() - 1


def test_prompts_too_small_for_the_vocabulary_are_rejected():
  def apply(params, tokens_BL):
    return np.zeros((*tokens_BL.shape, 257), "f4")

  def sample(dtype):
    decoder = sampling.Recompute(apply, 4)
    prompts = np.zeros((1, 0), dtype)
    return sampling.sample(decoder, {}, sampling.Sampler(), prompts, 4)[0]

  with refused("uint8 cannot represent 257 symbols"):
    sample(np.uint8)
  tokens = sample(np.uint16)
  assert tokens.shape == (1, 4)
  assert tokens.dtype == np.uint16
