"""What benchmarks find in texts, and hand to a network."""

import io
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import networks
from helpers.errors import refused

from benchmarks import corpora, matches, ngrams
from sparse_transformer import data
from sparse_transformer.model import transformer
from sparse_transformer.patterns import Local

pytestmark = pytest.mark.tools
N = 200


def texts(batch=3, size=3, seed=0):
  """Random symbols of which few differ, so that much occurs again."""
  return np.random.RandomState(seed).randint(0, size, (batch, N), np.uint8)


def plain_match(symbols, order):
  """The definition, one position after the other."""
  found = np.full(len(symbols), -1)
  for t in range(order, len(symbols)):
    context = symbols[t - order : t].tolist()
    for earlier in range(order, t):
      if symbols[earlier - order : earlier].tolist() == context:
        found[t] = earlier
  return found


@pytest.mark.parametrize("order", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 256])
def test_last_match_is_that_of_a_loop(order, size):
  symbols_BL = texts(size=size)
  expected = [plain_match(x, order) for x in symbols_BL]
  found = matches.last_match(jnp.asarray(symbols_BL), order)
  np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("most", [0, 20])
def test_blocks_have_the_key_that_holds_the_byte_after_the_match(size, most):
  pattern = matches.LastMatch(size, order=3, most=most)
  symbols_BL = texts()
  blocks = np.asarray(pattern.select(symbols_BL))
  assert blocks.shape == (3, 1, N, 1)
  for b, t in np.ndindex(symbols_BL.shape):
    match = plain_match(symbols_BL[b, : t + 1], 3)[t]
    is_found = match >= 0 and not 0 < most < t - match
    assert blocks[b, 0, t, 0] == ((match + 1) // size if is_found else -1)


def test_a_network_sees_the_match_and_nothing_later():
  pattern = matches.LastMatch(4, order=2)
  config = networks.config(
    length=N,
    shape=(N, 1),
    num_layers=2,
    patterns=((Local(9), Local(9) | pattern),) * 2,
  )
  params = networks.random_params(config, 0.3)
  apply = transformer.make_apply(config)
  symbols = texts() % config.vocab_size
  t = 120
  other = symbols.copy()
  other[:, t:] = (other[:, t:] + 1) % config.vocab_size
  before = np.asarray(apply(params, symbols))
  np.testing.assert_allclose(
    before[:, : t + 1], apply(params, other)[:, : t + 1], atol=1e-5
  )
  without = networks.config(
    length=N, shape=(N, 1), num_layers=2, patterns=((Local(9),) * 2,) * 2
  )
  assert (before != transformer.make_apply(without)(params, symbols)).any()


def test_symbols_one_by_one_are_refused():
  with refused("requires entire sequences, so it cannot be sampled"):
    matches.LastMatch(4).select(None)
  with refused("there is only one last match"):
    matches.LastMatch(4, 2)


def test_description_counts_copies_from_afar():
  random = np.random.RandomState(0).randint(0, 256, 1000, np.uint8).tobytes()
  found = matches.describe(random + random)
  assert found["bytes"] == 2000
  assert found["far"] == pytest.approx(0.5 * (1 - 6 / 1000), abs=0.01)
  assert found["right"] == 1
  assert found["lzma"][4] < 4.3


# Corpora.


def test_copyright_files_are_distinct_and_in_order(tmp_path):
  for name, content in dict(b=b"two", a=b"one", c=b"one").items():
    (tmp_path / name).mkdir()
    (tmp_path / name / "copyright").write_bytes(content)
  (tmp_path / "d").mkdir()
  (tmp_path / "d/copyright").write_bytes(b"x" * (corpora.MOST + 1))
  found = corpora.copyright_files(str(tmp_path))
  assert list(found.items()) == [("a", (b"a", b"one")), ("b", (b"b", b"two"))]


def test_masses_lose_their_records_and_stay_together():
  package = io.BytesIO()
  with zipfile.ZipFile(package, "w") as file:
    for name, mass in dict(Kyrie="I", Agnus="I", Credo="II").items():
      text = f"!!!COM: P\n!!!OPR: {mass}\n**kern\n4c\t4d\n!Bassus\n!!!END: x\n"
      file.writestr(f"music21/corpus/palestrina/{name}.krn", text)
    file.writestr("music21/corpus/other/x.krn", "4c\n")
  with refused("set --source to"):
    corpora.palestrina("")

  found = corpora.palestrina(package)
  rest = b"**kern\n4c\t4d\n!Bassus\n"
  assert list(found) == ["Agnus", "Credo", "Kyrie"]
  assert found["Kyrie"] == (b"I", rest)
  assert found["Credo"] == (b"II", rest)


def test_splits_have_entire_groups():
  documents = {str(i): (b"%d" % (i // 3), b"") for i in range(300)}
  split = corpora.split_of(documents, seed=1)
  assert all(split[str(3 * i)] == split[str(3 * i + 2)] for i in range(100))
  counts = [[*split.values()].count(x) for x in data.SPLITS]
  assert counts == [240, 30, 30]
  assert split != corpora.split_of(documents, seed=2)


def test_shuffled_pieces_stay_in_their_split():
  texts = dict(a=b"abcdefgh" * 3, b=b"ABCDEFGH", c=b"01234567")
  split = dict(a="train", b="test", c="validation")
  found, of = corpora.shuffle(texts, split, size=5, seed=0)
  assert of == {x: x for x in data.SPLITS}
  assert found["train"] != texts["a"]
  pieces = [texts["a"][i : i + 5] for i in range(0, 24, 5)]
  rest = found["train"]
  for piece in pieces:
    assert piece in rest
  for name, part in split.items():
    assert sorted(found[part]) == sorted(texts[name])


def plain_distribution(train, context):
  """The distribution of `ngrams` after a context, [256].

  Args:
    train: windows, each a list of bytes.
    context: the bytes before, at most `ngrams.MOST`; zeros before a window.
  """
  p = np.full(256, 1 / 256)
  for length in range(len(context) + 1):
    after = np.zeros(256)
    for window in train:
      padded = [0] * length + window
      for t in range(len(window)):
        if padded[t : t + length] == context[len(context) - length :]:
          after[window[t]] += 1
    if kinds := np.count_nonzero(after):
      p = (after + kinds * p) / (after.sum() + kinds)
  return p


def test_counts_after_contexts_are_those_of_a_loop():
  train_BL, scored_BL = texts(2, size=4, seed=1), texts(1, size=5, seed=2)
  train_BL, scored_BL = train_BL[:, :50], scored_BL[:, :20]
  orders = ngrams.count([train_BL[:1], train_BL[1:]], most=3)
  given = [
    ngrams.probability(orders, scored_BL, np.full_like(scored_BL, symbol))[0]
    for symbol in range(256)
  ]
  np.testing.assert_allclose(np.sum(given, 0), 1)
  for t, found in enumerate(np.transpose(given)):
    context = ([0] * 3 + scored_BL[0].tolist())[t : t + 3]
    expected = plain_distribution(train_BL.tolist(), context)
    np.testing.assert_allclose(found, expected)
  at = np.arange(scored_BL.size)
  mean = np.mean(-np.log2(np.array(given)[scored_BL[0], at]))
  windows = ngrams.windows_of(scored_BL[0], 20)
  assert ngrams.bits(orders, windows) == pytest.approx(mean)


def test_counts_after_seven_bytes_tell_contexts_apart():
  """The first of seven bytes, the highest bits of an integer, decides."""
  train = np.array([list(b"\xffabcdefX"), list(b"\xfeabcdefY")], np.uint8)
  orders = ngrams.count([np.tile(train, 50)])
  p_X = ngrams.probability(orders, train, np.full_like(train, ord("X")))[:, 7]
  assert p_X[0] > 0.9 and p_X[1] < 0.1


def plain_copy_rule(train, scored, length):
  """The rule of `copy_rule`, one byte after the other."""

  def windows(symbols):
    parts = range(0, len(symbols), length)
    return [symbols[start : start + length] for start in parts]

  def contexts(symbols):
    for window in windows(symbols):
      for t, match in enumerate(plain_match(window, matches.ORDER)):
        zeros = [0] * ngrams.MOST
        before = (zeros + window[:t].tolist())[-ngrams.MOST :]
        copied = None if match < 0 else window[match]
        yield window[t], before, copied, t - match

  known = [window.tolist() for window in windows(train)]
  pairs = [(symbol, copied) for symbol, _, copied, _ in contexts(train)]
  hits = [x == copied for x, copied in pairs if copied is not None]
  p_right = (sum(hits) + 1) / (len(hits) + 2)

  bits, found, far, right = [], [], [], []
  for symbol, before, copied, distance in contexts(scored):
    p = plain_distribution(known, before)
    found.append(copied is not None)
    if copied is not None:
      p[copied] = 0
      p *= (1 - p_right) / p.sum()
      p[copied] = p_right
      far.append(distance > 128)
      right.append(copied == symbol)
    bits.append(-np.log2(p[symbol]))
  fields = dict(bits=bits, found=found, far=far, right=right)
  return {name: np.mean(values) for name, values in fields.items()}


def test_copy_rule_is_that_of_a_loop():
  train, scored = (np.tile(texts(size=30, seed=x)[0], 3) for x in (0, 1))
  scored[400:420] = 7
  expected = plain_copy_rule(train, scored, 450)
  found = matches.copy_rule(train, scored, 450)
  assert found == pytest.approx(expected, rel=1e-9)
  assert 0.1 < found["far"] and 0.3 < found["found"] < 0.9
  assert found["right"] < 1
