"""Patterns that a function of positions or a matrix gives."""

import functools
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import catalogue
from helpers.errors import refused

from sparse_transformer import patterns
from sparse_transformer.figures import masks as pictures
from sparse_transformer.patterns import Causal, Full, analysis, explicit, where

WORDS = 3, 3, 1, 4, 1, 5, 5, 5, 2, 6
TABLE = jnp.array(WORDS)
RANDOM = np.random.default_rng(0).random((90, 90)) < 0.1


def later(q, k):
  return k >= q


@pytest.mark.parametrize(
  "function, plain",
  [
    (lambda q, k: True, lambda q, k: True),
    (later, later),
    (lambda q, k: abs(q - k) < 3, lambda q, k: abs(q - k) < 3),
    (lambda q, k: TABLE[q] == TABLE[k], lambda q, k: WORDS[q] == WORDS[k]),
    (lambda q, k: jnp.array(WORDS)[q] > k, lambda q, k: WORDS[q] > k),
    (lambda q, k: (k <= q) ^ (k < 2), lambda q, k: (k <= q) != (k < 2)),
    (lambda q, k: q >> 2 == k >> 2, lambda q, k: q // 4 == k // 4),
    (lambda q, k: q / 2 < k, lambda q, k: q < 2 * k),
    (
      lambda q, k: jnp.where(q < 4, k == q, k < 2),
      lambda q, k: k == q if q < 4 else k < 2,
    ),
    (
      lambda q, k: jnp.any(k == jnp.stack([q, q - 3])),
      lambda q, k: k in (q, q - 3),
    ),
    (
      functools.partial(lambda n, q, k: TABLE[q] > n, 3),
      lambda q, k: WORDS[q] > 3,
    ),
  ],
)
def test_a_function_says_which_pairs_there_are(function, plain):
  pattern = where(function)
  expected = [[plain(q, k) for k in range(10)] for q in range(10)]
  np.testing.assert_array_equal(pattern.matrix(10), expected)
  assert pattern.pairs(10) == np.sum(expected)
  in_program = jax.jit(pattern.mask)(*np.ogrid[:10, :10])
  np.testing.assert_array_equal(np.broadcast_to(in_program, (10, 10)), expected)


def test_a_matrix_says_which_pairs_there_are():
  for matrix in (RANDOM, jnp.asarray(RANDOM), RANDOM.tolist()):
    pattern = explicit(matrix)
    np.testing.assert_array_equal(pattern.matrix(90), RANDOM)
    in_program = jax.jit(pattern.mask)(*np.ogrid[:90, :90])
    np.testing.assert_array_equal(in_program, RANDOM)


def test_functions_are_compared_by_identity_and_matrices_by_their_pairs():
  changed = RANDOM.copy()
  pattern = explicit(changed)
  same = explicit(RANDOM.copy())
  changed[5, 3] ^= True  # which the pattern does not see

  assert pattern == same
  assert hash(pattern) == hash(same)
  assert explicit(changed) != pattern
  # Sizes whose rows have equally many bytes.
  assert explicit(RANDOM[:3, :3]) != explicit(RANDOM[:4, :4])
  assert len({explicit(np.zeros((n, n), bool)) for n in range(1, 9)}) == 8
  assert where(later) == where(later) != where(lambda q, k: k >= q)
  assert hash(where(later) & Causal()) == hash(where(later) & Causal())


def test_their_texts_are_short_and_name_them():
  assert str(where(later) & Causal()) == "where(later) & Causal()"
  text = str(explicit(RANDOM))
  assert text.startswith("explicit(")
  assert len(text) == len("explicit('12345678')")
  assert text != str(explicit(~RANDOM))

  for pattern in ("where(later)", text, "Causal() & where(later)"):
    with refused("a config, register a class") as error:
      patterns.parse(pattern)
    assert "\n" not in str(error.value)


NUMPY = np.array(WORDS)


@pytest.mark.parametrize(
  "function, words",
  [
    (lambda q, k: k <= q and q < 5, "use & | ~ for and, or, not"),
    (lambda q, k: k <= q if k > 3 else True, "boolean conversion"),
    (lambda q, k: NUMPY[q] == NUMPY[k], "look up in jnp.asarray(table)"),
    (lambda q, k: q - k, "returns int32 []"),
    (lambda q, k: jnp.stack([q < k, q < 5]), "returns bool [2]"),
    (lambda q, k: (q < k, q < 5), "must return a boolean"),
    (lambda b, h, q, k: k <= q, "missing 2 required positional arguments"),
    (lambda q, k: k < 3_000_000_000, "overflow"),
    (lambda q, k: 1 / 0, "division by zero"),
    (lambda q, k: next(iter(())), "known before tracing: "),
    ("Local(3)", "'str' object is not callable"),
  ],
)
def test_functions_that_give_no_boolean_are_refused_at_once(function, words):
  with refused(r"^where\(") as error:
    where(function)
  message = str(error.value)
  assert "\n" not in message
  assert words in message
  assert len(message) < 400


def test_what_a_program_traces_is_refused():
  def of_function(x):
    return where(lambda q, k: x[q] == x[k]).pairs(3)

  for use in (of_function, lambda x: explicit(x[:, None] == x[None])):
    with refused("known before tracing") as error:
      jax.jit(use)(TABLE)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "matrix, words",
  [
    (np.ones((3, 4), bool), "of bool [3, 4]"),
    (np.eye(3), "of float64 [3, 3]"),
    ([[1, 0], [0, 1]], "got list of int64 [2, 2]"),
    (True, "got bool of bool []"),
    (np.ones((1, 3, 3), bool), "of bool [1, 3, 3]"),
  ],
)
def test_matrices_that_are_not_square_and_boolean_are_refused(matrix, words):
  with refused(r"^explicit needs booleans") as error:
    explicit(matrix)
  assert words in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("n", [1, 89, 91, 200])
def test_a_matrix_is_refused_for_another_number_of_positions(n):
  given = explicit(RANDOM)
  for pattern in (given, Causal() & given, Full() - given):
    for use in (
      pattern.check,
      pattern.matrix,
      pattern.pairs,
      functools.partial(analysis.is_causal, pattern),
      functools.partial(analysis.measure_reach, ((pattern,),)),
    ):
      with refused(f"has 90 positions, but {n}"):
        use(n)

  with refused("has 90 positions"):
    pictures.panels(["random"], [given], (1, n), n)


def test_a_table_must_hold_an_entry_for_each_position():
  # JAX would take the last entry instead.
  for function in (
    lambda q, k: TABLE[q] >= k,
    lambda q, k: TABLE[k + 1] == 3,
    lambda q, k: jnp.ones((12, 10), bool)[q, k],
  ):
    pattern = where(function)
    pattern.check(9)
    for use in (lambda p: p.check(11), lambda p: (Causal() - p).pairs(11)):
      with refused("11 positions: out-of-bounds") as e:
        use(pattern)
      assert "\n" not in str(e.value)


def test_tables_keep_their_64_bits():
  with jax.enable_x64(True):
    hashes = jnp.array([5, 2**32 + 5, 5, 7])
    pattern = where(lambda q, k: hashes[q] == hashes[k])
    assert pattern.pairs(4) == 4 + 2
    in_program = jax.jit(pattern.mask)(*np.ix_(np.arange(4), np.arange(4)))
    assert in_program.sum() == 6


def test_values_that_overflow_32_bits_are_refused():
  pattern = where(lambda q, k: q * 2**20 < k)
  pattern.check(2000)
  with refused("32 bits"):
    pattern.check(3000)


def test_reach_follows_the_first_positions_of_a_matrix(monkeypatch):
  monkeypatch.setattr(analysis, "EXACT", 32)
  matrix = np.tri(90, dtype=bool) & ~np.tri(90, k=-4, dtype=bool)
  layers = ((explicit(matrix),),) * 12
  found = analysis.measure_reach(layers, 90)
  expected = analysis.measure_reach(((patterns.Local(4),),) * 12, 90)
  assert found == expected
  assert found.positions == 32


def test_functions_that_bounds_cannot_evaluate_take_little_memory():
  n = 4096
  table = jnp.arange(4096) // 256
  pattern = where(lambda q, k: (table[q] == table[k]) & (k <= q))

  assert not pattern.is_plain
  assert where(later).is_plain

  tracemalloc.start()
  try:
    assert pattern.pairs(n) == patterns.Block(256).pairs(n)
    _, peak = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()

  assert peak < n**2  # of bytes, one for each pair


def test_pictures_show_their_pairs():
  for pattern in (explicit(RANDOM), where(catalogue.similar)):
    found = pictures.image_of_matrix(pattern, 90)
    same = catalogue.Pairs(pattern.matrix(90))
    expected = pictures.image_of_matrix(same, 90)
    np.testing.assert_array_equal(found, expected)
  figure = pictures.panels(["a"], [explicit(RANDOM)], (9, 10), 90)
  assert len(figure.axes) == 2
