"""Named factorizations, expressions, and their assignment to layers."""

import warnings

import numpy as np
import pytest
from helpers.errors import refused

from sparse_transformer import patterns
from sparse_transformer.patterns import Block, Causal, Local, Strided, Summary

SETTINGS = dict(stride=8, window=8, width=2, num_summaries=2)


def assign(name, mode, num_layers, num_heads, **changes):
  return patterns.assign(
    name, mode, num_layers=num_layers, num_heads=num_heads, **SETTINGS | changes
  )


def fixed(shift):
  return Block(8) | Summary(8, 2, shift)


L = Local(8)
S = Strided(8)
T = Strided(8, offset=1)
C = Causal()
TWO = "Local(4), (Block(2), Block(3))"
A = Local(4)
B = Block(2)
D = Block(3)
E = Block(8)
F = Summary(8, 2)


@pytest.mark.parametrize(
  "name, mode, cycle, expected",
  [
    ("dense", "interleaved", (), [[C] * 2] * 3),
    ("local", "merged", (), [[L] * 2] * 3),
    # A single factor accepts any cycle.
    ("dense", "interleaved", (1, 0, 0), [[C] * 2] * 3),
    ("strided", "interleaved", (), [[L] * 2, [S] * 2, [L] * 2]),
    ("strided", "interleaved", (1, 0), [[S] * 2, [L] * 2, [S] * 2]),
    ("strided", "interleaved", (1, 0, 0, 0), [[f] for f in (S, L, L, L, S, L)]),
    ("strided_target", "interleaved", (), [[L] * 2, [T] * 2, [L] * 2]),
    ("strided_target", "merged", (), [[L | T] * 2] * 2),
    ("strided_target", "heads", (), [[L, T, L, T]] * 2),
    # Heads alternate between the two summaries.
    ("fixed", "merged", (), [[fixed(0), fixed(1), fixed(0)]]),
    ("fixed", "heads", (), [[E, F, E, Summary(8, 2, 1)]]),
    ("fixed_openai", "interleaved", (), [[fixed(0), fixed(1), fixed(0)]]),
    (TWO, "interleaved", (), [[A] * 4, [B, D, B, D]]),
    (TWO, "heads", (), [[A, B, A, D]] * 2),
    (TWO, "merged", (), [[A | B, A | D] * 2] * 2),
  ],
)
def test_modes_assign_the_factors_to_layers_and_heads(
  name, mode, cycle, expected
):
  found = assign(name, mode, len(expected), len(expected[0]), cycle=cycle)
  assert found == tuple(map(tuple, expected))


@pytest.mark.parametrize("mode", patterns.MODES)
def test_layers_with_the_same_patterns_share_them(mode):
  layers = assign("Local(4), (Block(2), Block(3))", mode, 10_000, 100)
  assert len(layers) == 10_000
  assert len(layers[0]) == 100
  assert layers[2] is layers[0]
  assert len(set(map(id, layers))) <= 2


@pytest.mark.parametrize(
  "text, mode",
  [
    (" | ".join(["Strided(9)"] * 17), "interleaved"),
    (" - ".join(["Strided(9)"] * 140), "heads"),
    (f"Local(3), (Local(4), Causal() & ({'Full() | ' * 16}Full()))", "heads"),
    (", ".join(["Strided(9)"] * 17), "merged"),
  ],
)
def test_heads_that_combine_too_many_patterns_are_rejected(text, mode):
  with refused("at most 16") as error:
    assign(text, mode, 1, 4)
  assert len(str(error.value)) < 500


def test_heads_of_one_factor_use_the_summaries_from_the_first():
  # The third summary would not fit, and is not needed.
  settings = dict(num_summaries=4, stride=8, width=3)
  ((*_, last),) = assign("fixed", "heads", 1, 4, **settings)
  assert last == Summary(8, 3, 1)


@pytest.mark.parametrize(
  "name, expected",
  [
    ("gpt3", [0, 8, 0, 8, 0, 8, 0]),
    ("gpt_oss", [128, 0, 128, 0, 128, 0, 128]),
    ("gemma2", [4096, 0, 4096, 0, 4096, 0, 4096]),
    ("gemma3", [1024] * 5 + [0, 1024]),
    ("olmo3", [4096] * 3 + [0] + [4096] * 3),
    ("cohere2", [4096] * 3 + [0] + [4096] * 3),
    ("llama4", [8192] * 3 + [0] + [8192] * 3),
  ],
)
def test_layers_of_a_layout_have_its_windows_in_turn(name, expected):
  """Windows or blocks; 0 for dense layers."""
  layers = assign(name, "interleaved", 7, 1)

  def sizes(p):
    return getattr(p, "window", getattr(p, "size", 0))

  assert [sizes(pattern) for (pattern,) in layers] == expected


def test_a_name_requires_only_the_settings_that_it_uses():
  assert patterns.factorize("gpt_oss") == (Local(128), Causal())
  for name in ("gpt3", "strided"):
    with refused(r"Local\(0\): window must be at"):
      patterns.factorize(name)
  with refused("num_summaries=0 must be at least 1"):
    patterns.factorize("fixed", stride=8, width=2, num_summaries=0)


def deepspeed_layout(num_blocks, local, width, num_patterns, head):
  """DeepSpeed's unidirectional FixedSparsityConfig, rule by rule.

  github.com/deepspeedai/DeepSpeed, ops/sparse_attention/sparsity_config.py:
  each block sees the blocks so far in its window of `local` blocks, and the
  `width` blocks that represent each window; those of a short last window move
  to the end of the sequence.
  """
  layout = np.zeros((num_blocks, num_blocks), bool)
  for row in range(num_blocks):
    layout[row, row // local * local : row + 1] = True
  offset = local - (1 + head % num_patterns) * width
  for window in range(0, num_blocks, local):
    start = min(window + offset, num_blocks - width)
    layout[start:, start : start + width] = True
  return layout


@pytest.mark.parametrize("num_blocks", [8, 10, 11])
@pytest.mark.parametrize("head", [0, 1, 2, 3])
def test_fixed_deepspeed_is_the_layout_of_deepspeed(num_blocks, head):
  size = 3
  layout = deepspeed_layout(num_blocks, 4, 1, 3, head)
  causal = np.tri(num_blocks * size, dtype=bool)
  settings = dict(stride=4 * size, window=1, width=size, num_summaries=3)
  (pattern,) = patterns.factorize("fixed_deepspeed", **settings, head=head)
  expected = layout.repeat(size, 0).repeat(size, 1) & causal

  np.testing.assert_array_equal(pattern.matrix(num_blocks * size), expected)


def test_fixed_lra_also_has_the_first_column_of_each_block():
  (found,) = patterns.factorize("fixed_lra", **SETTINGS)
  q, k = np.indices((50, 50))
  rest = k % 8
  block = q // 8 == k // 8
  summary = (rest == 0) | (rest >= 8 - 2)
  expected = (block | summary) & (k <= q)

  np.testing.assert_array_equal(found.matrix(50), expected)
  (paper,) = patterns.factorize("fixed_openai", **SETTINGS)
  assert paper.pairs(50) < found.pairs(50)


@pytest.mark.parametrize(
  "pattern",
  [
    Local(12) | Strided(12) | Block(3),
    Local(12) | (Strided(12) | Block(3)),
    (Local(9, causal=False) - Local(2)) & Strided(3),
    Causal() - (Block(6, previous=1) & Summary(20, 3, shift=2)),
  ],
  ids=str,
)
def test_combination_is_parsed_back_from_its_text(pattern):
  assert patterns.parse(str(pattern)) == ((pattern,),)


@pytest.mark.parametrize(
  "text, message",
  [
    ("\0", "unknown pattern"),
    (r"Local('\d')", "integer"),
    ("Local('" + "3" * 3900 + "')", "integer, not '333"),
    ("Local(0x" + "f" * 1900 + ")", "32 bits"),
    ("Local(" + "9" * 5000 + ")", "5007 characters.*at most 4000"),
    ("-" * 1900 + "Causal()", "unknown pattern '---"),
    ("Local(" * 300, "unknown pattern"),
    ("Local(" + "-" * 1900 + "1)", "is not a number"),
    ("(Local(4), Local(8))", "a comma at its end if heads alternate"),
  ],
)
def test_error_about_a_wrong_expression_is_one_line(text, message):
  with refused(message) as error, warnings.catch_warnings(action="error"):
    patterns.parse(text)[0][0].check(1000)
  assert "\n" not in str(error.value)
  assert len(str(error.value)) < 600


@pytest.mark.parametrize(
  "text, words",
  [
    (
      "dense",
      "a name that only attention.pattern of a config accepts",
    ),
    ("dense", r"or in an expression, write Causal\(\)$"),
    ("strided", r"write Local\(128\) \| Strided\(128\)$"),
    ("Global(3) | strided", r"write Local\(128\) \| Strided\(128\)$"),
    ("strided_target", r"write Local\(128\) \| Strided\(128, offset=1\)$"),
    ("gemma3", r"write Local\(1024\) or Causal\(\)$"),
  ],
)
def test_a_name_in_an_expression_says_what_it_stands_for(text, words):
  with refused(words) as error:
    patterns.parse(text)
  written = str(error.value).rpartition("write ")[2].split(" or ")
  assert all(patterns.parse(text) for text in written)


def test_bidirectional_patterns_see_both_ways():
  cases = {
    Local(4) | Strided(8): Local(4, causal=False) | Strided(8, causal=False),
    Block(8) - Causal(): Block(8, causal=False) - patterns.Full(),
    Local(4) | Causal(): Local(4, causal=False) | patterns.Full(),
    patterns.TopBlocks(2, 2): patterns.TopBlocks(2, 2),
  }
  for pattern, expected in cases.items():
    assert patterns.bidirectional(pattern) == expected
