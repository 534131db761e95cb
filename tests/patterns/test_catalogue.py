import functools
import itertools
import subprocess
import sys

import catalogue
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  BigBird,
  Block,
  Causal,
  Column,
  Dilated,
  Full,
  Global,
  Local,
  LogSparse,
  Longformer,
  Neighborhood,
  Pattern,
  RandomBlocks,
  Row,
  Strided,
  Summary,
)

SETTINGS = dict(stride=8, window=8, width=2, num_summaries=1)


def grid(text):
  return np.array([[c == "1" for c in row] for row in text.split()])


@pytest.mark.parametrize(
  "pattern, expected",
  [
    (Causal(), "10000 11000 11100 11110 11111"),
    (Local(1), "10000 01000 00100 00010 00001"),
    (Local(3), "10000 11000 11100 01110 00111"),
    (Strided(2), "10000 01000 10100 01010 10101"),
    (Block(2), "10000 11000 00100 00110 00001"),
    (Summary(2, 1), "00000 01000 01000 01010 01010"),
    (Summary(4, 1, 2), "00000 01000 01000 01000 01000"),
    (Summary(3, 2), "00000 01000 01100 01100 01101"),
    (Local(2) | Strided(2), "10000 11000 11100 01110 10111"),
    (Causal() & Strided(3), "10000 01000 00100 10010 01001"),
    (Causal() - Local(2), "00000 00000 10000 11000 11100"),
    (Full(), "11111 11111 11111 11111 11111"),
    (Local(3, causal=False), "11000 11100 01110 00111 00011"),
    (Local(4, causal=False), "11100 11110 11111 01111 00111"),
    (Dilated(2, 2), "10000 01000 10100 01010 00101"),
    (Dilated(2, 2, causal=False), "10100 01010 10101 01010 00101"),
    (Strided(2, causal=False), "10101 01010 10101 01010 10101"),
    (Block(2, previous=1), "10000 11000 11100 11110 00111"),
    (Block(2, causal=False), "11000 11000 00110 00110 00001"),
    (Block(2, 1, causal=False), "11110 11110 11111 11111 00111"),
    (Summary(2, 1, causal=False), "01010 01010 01010 01010 01010"),
    (LogSparse(), "10000 11000 11100 01110 10111"),
    (LogSparse(4), "10000 11000 11100 11110 11111"),
    (Global(2), "10000 11000 11000 11000 11000"),
    (Global(1, causal=False), "11111 10000 10000 10000 10000"),
    (RandomBlocks(1, 9, last=2), "00000 00000 10000 11000 11100"),
    (RandomBlocks(1, 9, first=1), "00000 00000 01000 01100 01110"),
    (RandomBlocks(1, 9, causal=False), "01111 10111 11011 11101 11110"),
    (Longformer(2, 1), "10000 11000 11100 10110 10011"),
    (Longformer(2, 1, causal=False), "11111 11100 11110 10111 10011"),
    (Row(2, 1), "10000 11000 00100 00110 00001"),
    (Row(1, 2, causal=False), "11000 11000 00110 00110 00001"),
    (Row(2, 1, previous=1), "10000 11000 11100 11110 00111"),
    (Row(2, 1, 1, causal=False), "11110 11110 11111 11111 00111"),
    (Column(2, 1), "10000 01000 10100 01010 10101"),
    (Column(1, 2, causal=False), "11111 11111 11111 11111 11111"),
    (Neighborhood(2, 1, 2, 1), "10000 01000 10100 01010 00101"),
    (Neighborhood(2, 3, 2, 1), "10000 11000 11100 11110 00111"),
    (Neighborhood(3, 1, 2, 1, causal=False), "10100 01010 10101 01010 00101"),
    # Of seed 0: a pattern must stay what it was when a network was trained.
    (RandomBlocks(1, 1), "00000 10000 01000 01000 10000"),
    (BigBird(1, num_random=1), "10000 11000 11100 11110 11011"),
    (
      BigBird(1, 1, num_random=1, seed=1, causal=False),
      "11111 11100 11110 10111 10011",
    ),
  ],
)
def test_matrix_of_each_pattern(pattern, expected):
  np.testing.assert_array_equal(pattern.matrix(5), grid(expected))


# Pairs of the published settings by pattern: n, l, c, then causal, local,
# strided, block, summary, merged strided, merged fixed.
COUNTS = """
3072 96 0 4720128 290352 50688 148992 - 337968 -
3072 128 8 4720128 385088 38400 198144 283488 420416 480768
12288 128 32 75503616 1564736 595968 792576 18728448 2148416 19470336
65536 256 0 2147516416 16744576 8421376 8421376 - 25100416 -
1048576 1024 0 549756338176 1073218048 537395200 537395200 - 1609564672 -
"""


@pytest.mark.parametrize("row", COUNTS.strip().split("\n"))
def test_pairs_of_the_published_settings(row):
  n, stride, width, *counts = row.split()
  n, stride, width = int(n), int(stride), int(width)
  made = [Causal(), Local(stride), Strided(stride), Block(stride)]
  made += [Summary(stride, width) if width else None]
  made += [Local(stride) | Strided(stride)]
  made += [Block(stride) | Summary(stride, width) if width else None]
  found = ["-" if p is None else str(p.pairs(n)) for p in made]
  assert found == counts


MADE = (
  *catalogue.ALL,
  Row(4, 3, previous=1),
  Row(4, 3, previous=1, causal=False),
)


def compositions():
  """Random patterns: those above, combined by | & -."""
  combine = [Pattern.__or__, Pattern.__and__, Pattern.__sub__]
  return st.recursive(
    st.sampled_from(MADE),
    lambda inner: st.builds(
      lambda f, a, b: f(a, b), st.sampled_from(combine), inner, inner
    ),
    max_leaves=4,
  )


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(
  compositions(), st.integers(1, 130), st.sampled_from([1, 3, 8, 16, 64])
)
def test_all_that_is_derived_agrees_with_the_matrix(pattern, n, tile):
  matrix = pattern.matrix(n)
  assert pattern.pairs(n) == matrix.sum()
  i = n // 2
  np.testing.assert_array_equal(pattern.keys(i, n), np.flatnonzero(matrix[i]))
  total = np.zeros((n, n), int)
  for part in pattern.parts():
    total += part.matrix(n)
    check_layout(part, n, tile)
  # Every pair lies in exactly one part.
  np.testing.assert_array_equal(total, matrix)


def check_layout(part, n, tile):
  layout, num_tiles = part.layout(n, tile), -(-n // tile)
  for order in (layout.query_order, layout.key_order):
    np.testing.assert_array_equal(np.sort(order), np.arange(n))
  padded = np.zeros((num_tiles * tile,) * 2, int)
  padded[:n, :n] = part.matrix(n)[layout.query_order][:, layout.key_order]
  inside = np.zeros_like(padded)
  inside[:n, :n] = 1
  tiles, area = (
    x.reshape(num_tiles, tile, num_tiles, tile).sum((1, 3))
    for x in (padded, inside)
  )
  found, full = np.zeros_like(tiles), np.zeros(tiles.shape, bool)
  found[layout.rows, layout.cols] = layout.pairs
  full[layout.rows, layout.cols] = layout.full
  np.testing.assert_array_equal(found, tiles)
  np.testing.assert_array_equal(full, (tiles > 0) & (tiles == area))
  assert (layout.pairs > 0).all()
  sorted_by_tile = np.lexsort((layout.cols, layout.rows))
  np.testing.assert_array_equal(sorted_by_tile, np.arange(len(layout.rows)))


@pytest.mark.parametrize("tile, tiles", [(128, 160), (512, 40)])
def test_columns_fill_tiles_in_their_own_order(tile, tiles):
  pattern = Strided(128)
  assert len(pattern.layout(12288, tile).rows) == tiles
  # In natural order every tile of the causal triangle holds some pair.
  n = 12288 // tile
  natural = (Causal() & pattern).layout(12288, tile)
  assert len(natural.rows) == n * (n + 1) // 2


@pytest.mark.parametrize("tile, fill", [(32, 0.758), (64, 0.455), (128, 0.227)])
def test_columns_fill_small_tiles_best(tile, fill):
  # A column is 96 long: three tiles of 32, and a triangle of tiles is full
  # but for its diagonal. In natural order a tile has one pair in 128.
  layout = Strided(128).layout(12288, tile)
  assert layout.fill == pytest.approx(fill, abs=0.001)
  natural = (Causal() & Strided(128)).layout(12288, tile)
  assert natural.fill < 0.04


def test_summary_columns_fill_tiles_in_their_own_order():
  layout = Summary(128, 32).layout(12288, 64)
  assert layout.fill > 0.9
  assert layout.cols.max() < 12288 * 32 / 128 / 64  # gathered in front


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_layouts_of_a_million_positions_stay_small():
  # The high-water mark of the new process: ru_maxrss counts its parent's.
  code = (
    "from sparse_transformer.patterns import Local, Strided\n"
    "pattern = Local(1024) | Strided(1024)\n"
    "tiles = [len(p.layout(2**20, 128).rows) for p in pattern.parts()]\n"
    "status = open('/proc/self/status').read()\n"
    "print(*tiles, status.split('VmHWM:')[1].split()[0])\n"
  )
  out = subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, check=True
  )
  *tiles, peak = map(int, out.stdout.split())
  assert tiles == [73_692, 36_864]
  assert peak < 512 * 1024  # KiB


@pytest.mark.parametrize(
  "pattern, query, expected",
  [
    # 4 columns of 2 channels: pixel (2, 1), second channel.
    (Row(4, 2), 19, "16-19"),
    (Column(4, 2), 19, "2-3 10-11 18-19"),
    (Neighborhood(2, 3, 4, 2), 19, "8-13 16-19"),
    (Neighborhood(3, 3, 4, 2, causal=False), 19, "8-13 16-21 24-29"),
    # A row's end does not reach around to the next row's beginning.
    (Neighborhood(2, 3, 4, 2), 16, "8-11 16"),
    (BigBird(2, num_random=9), 11, "0-11"),
  ],
)
def test_keys_of_one_query(pattern, query, expected):
  found = set()
  for run in expected.split():
    first, *last = map(int, run.split("-"))
    found |= set(range(first, (last or [first])[0] + 1))
  assert set(pattern.keys(query, 32)) == found


@pytest.mark.parametrize("pattern", catalogue.CAUSAL, ids=str)
def test_causal_patterns_see_no_later_key(pattern):
  assert not np.triu(pattern.matrix(90), 1).any()


@pytest.mark.parametrize("pattern", catalogue.BIDIRECTIONAL, ids=str)
def test_bidirectional_patterns_see_later_keys(pattern):
  assert np.triu(pattern.matrix(90), 1).any()


@pytest.mark.parametrize(
  "pattern",
  [p for p in catalogue.BIDIRECTIONAL if "Summary" not in str(p)],
  ids=str,
)
def test_bidirectional_patterns_are_symmetric(pattern):
  matrix = pattern.matrix(90)
  np.testing.assert_array_equal(matrix, matrix.T)


MILLION = 2**20
POSITIONS = np.arange(MILLION)


def neighborhood_keys(i):
  """Of 9 x 9 pixels, 64 columns, 3 channels, by query."""
  row, column, channel = i // 192, i // 3 % 64, i % 3
  left, right = np.minimum(column, 4), np.minimum(63 - column, 4)
  above = np.minimum(row, 8) * (left + 1 + right) * 3
  return above + left * 3 + channel + 1


# The number of keys of query i, in closed form.
AT_SCALE = [
  (Causal(), lambda i: i + 1),
  (Full(), lambda i: MILLION),
  (Local(1024), lambda i: np.minimum(i + 1, 1024)),
  (Dilated(128, 64), lambda i: np.minimum(i // 64 + 1, 128)),
  (Strided(1024), lambda i: i // 1024 + 1),
  (
    Block(128, previous=2),
    lambda i: i % 128 + 1 + np.minimum(i // 128, 2) * 128,
  ),
  (
    Summary(128, 32),
    lambda i: i // 128 * 32 + np.clip(i % 128 - 95, 0, None),
  ),
  (LogSparse(), lambda i: 1 + np.frexp(i)[1]),
  (Global(64), lambda i: np.minimum(i + 1, 64)),
  (RandomBlocks(64, 3), lambda i: np.minimum(i // 64, 3) * 64),
  (Longformer(512, 64), lambda i: np.minimum(i + 1, 512 + 64)),
  (
    BigBird(64),
    lambda i: i % 64 + 1 + np.minimum(i // 64, 5) * 64,
  ),
  (Row(64, 3), lambda i: i % 192 + 1),
  (Column(64, 3), lambda i: i // 192 * 3 + i % 3 + 1),
  (Neighborhood(9, 9, 64, 3), neighborhood_keys),
]


def test_every_pattern_is_tried_at_scale():
  tried = {type(pattern) for pattern, _ in AT_SCALE}
  assert tried == set(patterns.CATALOGUE.values())


@pytest.mark.parametrize(
  "pattern, keys", AT_SCALE, ids=[str(pattern) for pattern, _ in AT_SCALE]
)
def test_pairs_of_a_million_positions_are_those_of_their_rows(pattern, keys):
  rows = np.broadcast_to(keys(POSITIONS), MILLION)
  assert pattern.pairs(MILLION) == rows.sum(dtype=np.int64)


@pytest.mark.parametrize(
  "pattern",
  [
    *(pattern for pattern, _ in AT_SCALE),
    Local(1024, causal=False),
    Dilated(128, 64, causal=False),
    Block(128, 2, causal=False),
    RandomBlocks(1, 3, seed=123456789),
    RandomBlocks(4, 1, causal=False),
    BigBird(64, causal=False),
    Column(64, 3, causal=False),
    Neighborhood(9, 9, 64, 3, causal=False),
  ],
  ids=str,
)
def test_masks_fit_32_bits_at_a_million_positions(pattern):
  i = np.random.RandomState(0).randint(0, MILLION, 4000)
  i[:100] = MILLION - 1 - np.arange(100)
  pairs = [(i[:, None], i[None, :800]), (i, np.maximum(i - 64, 0))]
  for q, k in pairs:
    with np.errstate(over="raise"):
      narrow = pattern.mask(q.astype(np.int32), k.astype(np.int32))
    np.testing.assert_array_equal(narrow, pattern.mask(q, k))


@pytest.mark.parametrize("count", [1, 100, 2**14, 2**16, MILLION])
def test_draws_cover_all_that_may_be_drawn(count):
  chances = np.arange(patterns._LEVELS, dtype=np.int32)
  drawn = patterns._share(chances, np.int32(count))
  assert (np.diff(drawn) >= 0).all() and drawn[0] == 0
  assert count - drawn[-1] <= -(-count // patterns._LEVELS) + 1
  assert drawn[-1] < count


@pytest.mark.parametrize(
  "pattern, expected",
  [
    (Causal(), None),
    (Local(1024) | Strided(1024), None),
    (Local(9, causal=False), (0, 1)),
    (Strided(1024, causal=False) | Causal(), (0, 1024)),
    (
      Block(96, causal=False) - Global(500_000, causal=False),
      (500_000, 500_001),
    ),
  ],
  ids=str,
)
def test_first_leak_of_a_million_positions(pattern, expected):
  assert patterns.first_leak(pattern, MILLION) == expected


@hypothesis.settings(deadline=None, max_examples=50)
@hypothesis.given(compositions(), st.integers(1, 60))
def test_first_leak_is_the_first_key_above_the_diagonal(pattern, n):
  queries, keys = np.nonzero(np.triu(pattern.matrix(n), 1))
  found = min(zip(keys, queries, strict=True), default=None)
  assert patterns.first_leak(pattern, n) == (found and found[::-1])


def test_random_blocks_are_distinct_and_from_the_past():
  pattern = RandomBlocks(1, 3, seed=1, first=2, last=4)
  matrix = pattern.matrix(400)
  eligible = np.clip(np.arange(400) - 4 - 2 + 1, 0, None)
  np.testing.assert_array_equal(matrix.sum(1), np.minimum(eligible, 3))
  q, k = np.nonzero(matrix)
  assert (k >= 2).all() and (q - k >= 4).all()


def test_random_blocks_are_drawn_evenly():
  # Where a draw falls in its row's past: a tenth in each tenth of it.
  shares = []
  for seed in range(8):
    q, k = np.nonzero(RandomBlocks(1, 3, seed).matrix(1000)[100:])
    shares.append(k / (q + 100))
  counts, _ = np.histogram(np.concatenate(shares), 10, (0, 1))
  assert abs(counts / counts.mean() - 1).max() < 0.05


def test_random_blocks_follow_their_seed():
  matrices = [RandomBlocks(1, 3, seed).matrix(300) for seed in range(6)]
  shared = [
    (a & b).sum() / a.sum() for a, b in itertools.combinations(matrices, 2)
  ]
  assert max(shared) < 0.2  # rows near the start have no choice
  np.testing.assert_array_equal(matrices[0], RandomBlocks(1, 3, 0).matrix(300))


def test_bigbird_is_its_three_kinds_of_blocks():
  pattern = BigBird(4, window=3, num_global=2, num_random=3)
  blocks = pattern.matrix(200)[::4, ::4]
  i = np.arange(50)
  near = (i[:, None] - i >= 0) & (i[:, None] - i <= 1)
  always = near | ((i < 2) & (i <= i[:, None]))
  assert (blocks & always == always).all()
  rest = np.clip(i - 2 - 2 + 1, 0, 3)  # blocks 2 to row - 2, at most 3 drawn
  np.testing.assert_array_equal((blocks & ~always).sum(1), rest)


def test_random_blocks_visit_only_their_tiles():
  layout = BigBird(64).layout(12288, 64)
  window, first, drawn = 2 * 192 - 1, 192 - 2, np.clip(np.arange(192) - 2, 0, 3)
  assert len(layout.rows) == window + first + drawn.sum()


def test_powers_of_two_take_few_tiles():
  pattern, n = LogSparse(), 12288
  tiles = [len(part.layout(n, 64).rows) for part in pattern.parts()]
  assert sum(tiles) < 3 * 2 * n / 64 + 3 * 192  # 3 groups of 6 distances
  # In natural order each distance is a diagonal of its own.
  natural = (Causal() & pattern).layout(n, 64)
  assert len(natural.rows) > sum(tiles)


def test_patches_fill_tiles_better_than_raster_order():
  pattern = Neighborhood(9, 9, 32, 3)
  natural = (Causal() & pattern).layout(3072, 64)
  assert pattern.layout(3072, 64).fill > 1.4 * natural.fill


def test_union_of_patterns_in_natural_order_is_one_part():
  assert len((Local(4) | Block(3) | Global(2)).parts()) == 1
  assert len((Local(4) | Strided(3)).parts()) == 2
  assert len(BigBird(4).parts()) == 1


def deepspeed_layout(num_blocks, local, width, num_patterns, head):
  """DeepSpeed's FixedSparsityConfig, unidirectional, rule by rule.

  github.com/deepspeedai/DeepSpeed, ops/sparse_attention/sparsity_config.py:
  each block sees the blocks so far in its window of `local` blocks, and of
  every window the `width` blocks that represent it; those of a short last
  window move to the end of the sequence.
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
def test_fixed_of_deepspeed_is_its_layout(num_blocks, head):
  size = 3
  layout = deepspeed_layout(num_blocks, 4, 1, 3, head)
  causal = np.tri(num_blocks * size, dtype=bool)
  (pattern,) = patterns.factorize(
    "fixed_deepspeed",
    stride=4 * size,
    window=1,
    width=size,
    num_summaries=3,
    head=head,
  )
  expected = layout.repeat(size, 0).repeat(size, 1) & causal
  np.testing.assert_array_equal(pattern.matrix(num_blocks * size), expected)


def test_fixed_of_long_range_arena_opens_the_first_column_too():
  settings = dict(stride=8, window=1, width=2, num_summaries=1)
  (found,) = patterns.factorize("fixed_lra", **settings)
  q, k = np.indices((50, 50))
  rest = k % 8
  block, summary = q // 8 == k // 8, (rest == 0) | (rest >= 8 - 2)
  expected = (block | summary) & (k <= q)
  np.testing.assert_array_equal(found.matrix(50), expected)
  (paper,) = patterns.factorize("fixed_openai", **settings)
  assert paper.pairs(50) < found.pairs(50)


def test_fixed_of_openai_is_one_factor_with_distinct_summaries():
  settings = dict(stride=8, window=1, width=2, num_summaries=2)
  (layer,) = patterns.assign(
    "fixed_openai", "interleaved", num_layers=1, num_heads=3, **settings
  )
  assert layer == tuple(Block(8) | Summary(8, 2, s) for s in (0, 1, 0))


@pytest.mark.parametrize("pattern", catalogue.ALL, ids=str)
def test_pattern_is_read_back_from_its_name(pattern):
  if "Fifths" not in str(pattern) and "Thirds" not in str(pattern):
    assert patterns.parse(str(pattern)) == ((pattern,),)


def test_expression_gives_factors_and_heads():
  found = patterns.parse("Local(4) | Strided(8), (Local(2), BigBird(seed=3))")
  expected = (Local(4) | Strided(8),), (Local(2), BigBird(seed=3))
  assert found == expected


@pytest.mark.parametrize(
  "mode, expected",
  [
    ("interleaved", [[Local(4)] * 4, [Block(2), Block(3), Block(2), Block(3)]]),
    ("heads", [[Local(4), Block(2), Local(4), Block(3)]] * 2),
    ("merged", [[Local(4) | Block(2), Local(4) | Block(3)] * 2] * 2),
  ],
)
def test_modes_place_the_factors_of_an_expression(mode, expected):
  found = patterns.assign(
    "Local(4), (Block(2), Block(3))",
    mode,
    num_layers=2,
    num_heads=4,
    **SETTINGS,
  )
  assert [list(heads) for heads in found] == expected


@pytest.mark.parametrize(
  "text, words",
  [
    ("Locl(4)", ["'Locl(4)'", "Local", "strided"]),
    ("Local(4) +  Block(2)", ["'Local(4) + Block(2)'"]),
    ("Local(4", ["'Local(4'"]),
    ("", ["unknown attention.pattern"]),
    ("()", ["unknown attention.pattern"]),
    ("Local()", ["Local()", "missing", "window"]),
    ("Local(4, 5, 6)", ["takes"]),
    ("Local(size=4)", ["size"]),
    ("Local(0)", ["Local(0)", "at least 1"]),
    ("Longformer(8, 0)", ["num_global", "at least 1"]),
    ("Local('a')", ["integer"]),
    ("Local(4.0)", ["integer"]),
    ("Local(True)", ["integer"]),
    ("Local(4, 5)", ["causal", "True or False"]),
    ("Local(9999999999)", ["window", "32 bits"]),
    ("Local(n)", ["unknown attention.pattern 'n'"]),
    ("Local(*(4,))", ["unknown attention.pattern"]),
    ("Local(**{'window': 4, 3: 2})", ["Local"]),
    ("Local(4), 3", ["unknown attention.pattern '3'"]),
    ("Local(4), ((Block(2), Block(3)), Block(4))", ["(Block(2), Block(3))"]),
    ("[Local(4)]", ["unknown attention.pattern '[Local(4)]'"]),
    ("Local(4) | strided", ["unknown attention.pattern 'strided'"]),
    ("BigBird(window=2)", ["window", "odd"]),
    ("Local(open('x'))", ["Local"]),
    ("__import__('os')", ["unknown attention.pattern"]),
    ("Local(4).window", ["unknown attention.pattern"]),
    ("not Local(4)", ["unknown attention.pattern"]),
  ],
)
def test_expression_that_makes_no_sense_is_refused(text, words):
  with pytest.raises(ValueError) as error:
    patterns.parse(text)
  assert "\n" not in str(error.value)
  for word in words:
    assert word in str(error.value)


def full(n):
  return Causal().matrix(n)


def layers(*factors):
  return tuple((factor,) for factor in factors)


def reaches_all(layers, n=96):
  return (patterns.reach(layers, n) == full(n)).all()


def test_strided_reaches_its_whole_past_in_either_order():
  assert reaches_all(layers(Local(8), Strided(8)))
  assert reaches_all(layers(Strided(8), Local(8)))
  assert not reaches_all(layers(Local(7), Strided(8)))


def test_fixed_reaches_its_whole_past_block_first():
  assert reaches_all(layers(Block(8), Summary(8, 2)))
  assert not reaches_all(layers(Summary(8, 2), Block(8)))


def test_merged_fixed_reaches_its_whole_past_in_two_layers():
  merged = Block(8) | Summary(8, 2)
  assert reaches_all(layers(merged, merged))
  assert not reaches_all(layers(merged))


def test_heads_with_all_summaries_reach_what_an_earlier_one_does_not():
  settings = SETTINGS | dict(num_summaries=2)
  early = Block(8) | Summary(8, 2, 1)
  assert patterns.reach(layers(early, early), 96).sum() == 3600  # of 4656
  heads = patterns.assign(
    "fixed", "merged", num_layers=2, num_heads=4, **settings
  )
  assert reaches_all(heads)


@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize(
  "name",
  [
    "dense",
    "strided",
    "fixed",
    "fixed_openai",
    "fixed_deepspeed",
    "fixed_lra",
    "Row(8, 3, previous=1), Column(8, 3)",
  ],
)
def test_named_factorization_reaches_its_whole_past(name, mode):
  assigned = patterns.assign(name, mode, num_layers=2, num_heads=2, **SETTINGS)
  assert reaches_all(assigned)


def test_row_and_column_alone_miss_what_is_above_and_to_the_right():
  assert not reaches_all(layers(*[Row(8), Column(8)] * 4))


def test_gaps_that_double_reach_the_whole_past():
  gaps = [Dilated(2, 2**layer) for layer in range(7)]
  assert reaches_all(layers(*gaps))
  assert not reaches_all(layers(*gaps[:-1]))


def test_powers_of_two_reach_the_whole_past():
  assert reaches_all(layers(*[LogSparse()] * 6))  # 95 has 6 binary digits 1
  assert not reaches_all(layers(*[LogSparse()] * 5))


def test_reach_keeps_what_a_position_has():
  np.testing.assert_array_equal(patterns.reach((), 5), np.eye(5, dtype=bool))
  none = (Causal() - Causal(),)
  np.testing.assert_array_equal(patterns.reach((none,), 5), np.eye(5))


def test_interleaved_takes_the_factors_in_turn():
  assigned = patterns.assign(
    "strided", "interleaved", num_layers=3, num_heads=2, **SETTINGS
  )
  assert assigned == ((Local(8),) * 2, (Strided(8),) * 2, (Local(8),) * 2)


def test_interleaved_follows_its_cycle():
  assigned = patterns.assign(
    "strided",
    "interleaved",
    num_layers=6,
    num_heads=1,
    cycle=(1, 0, 0, 0),
    **SETTINGS,
  )
  expected = [Strided(8), Local(8), Local(8), Local(8), Strided(8), Local(8)]
  assert [heads[0] for heads in assigned] == expected


def test_merged_gives_each_head_its_own_summary():
  settings = SETTINGS | dict(num_summaries=2)
  (heads,) = patterns.assign(
    "fixed", "merged", num_layers=1, num_heads=3, **settings
  )
  shifts = [0, 1, 0]
  assert heads == tuple(Block(8) | Summary(8, 2, s) for s in shifts)


def test_heads_take_the_factors_and_their_summaries_in_turn():
  settings = SETTINGS | dict(num_summaries=2)
  (heads,) = patterns.assign(
    "fixed", "heads", num_layers=1, num_heads=4, **settings
  )
  assert heads == (Block(8), Summary(8, 2, 0), Block(8), Summary(8, 2, 1))


@pytest.mark.parametrize("name", ["dense", "local"])
def test_one_factor_takes_any_cycle(name):
  (factor,) = patterns.factorize(name, **SETTINGS)
  assigned = patterns.assign(
    name,
    "interleaved",
    num_layers=2,
    num_heads=1,
    cycle=(1, 0, 0, 0),
    **SETTINGS,
  )
  assert assigned == ((factor,), (factor,))


@pytest.mark.parametrize(
  "make, words",
  [
    (lambda: Local(0), ["Local(0)", "at least 1"]),
    (lambda: Strided(-3), ["Strided(-3)", "at least 1"]),
    (lambda: Block(2.5), ["Block(2.5)", "integer"]),
    (lambda: Block(True), ["size", "integer"]),
    (lambda: Summary(8, 9), ["Summary(8, 9)", "at most"]),
    (lambda: Summary(8, 3, 2), ["shift=2", "(shift + 1) * width"]),
    (lambda: Summary(8, 3, -1), ["shift=-1"]),
    (lambda: Summary(8, 2, 0.5), ["shift=0.5", "integer"]),
    (lambda: Causal().layout(0, 4), ["n=0", "at least 1"]),
    (
      lambda: patterns.factorize("stride", **SETTINGS),
      ["'stride'", "dense, local, strided, fixed"],
    ),
    (
      lambda: patterns.factorize("fixed", **SETTINGS | dict(num_summaries=0)),
      ["num_summaries=0"],
    ),
    (
      lambda: patterns.assign(
        "fixed", "mixed", num_layers=1, num_heads=1, **SETTINGS
      ),
      ["'mixed'", "interleaved, merged, heads"],
    ),
    (
      lambda: patterns.assign(
        "fixed",
        "interleaved",
        num_layers=1,
        num_heads=1,
        cycle=(0, 2),
        **SETTINGS,
      ),
      ["(0, 2)", "0 to 1", "'fixed'"],
    ),
  ],
)
def test_what_makes_no_sense_is_refused_with_its_values(make, words):
  with pytest.raises(ValueError) as error:
    make()
  for word in words:
    assert word in str(error.value)


def test_patterns_are_values():
  made = [Local(4) | Strided(4), Local(4) | Strided(4), Local(4) | Strided(5)]
  assert made[0] == made[1] != made[2]
  assert len(set(made)) == 2


@pytest.mark.parametrize("combine", ["and", "or", "not"])
def test_logical_operators_are_refused(combine):
  with pytest.raises(TypeError, match="& -"):
    if combine == "and":
      Causal() and Local(1)
    elif combine == "or":
      Causal() or Local(1)
    else:
      not Causal()


def test_numpy_integers_make_the_same_patterns():
  three, six = np.int64(3), np.int64(6)
  for numpy, plain in (
    (Local(three) | Strided(three), Local(3) | Strided(3)),
    (
      Block(six) | Summary(six, three, np.int64(1)),
      Block(6) | Summary(6, 3, 1),
    ),
  ):
    assert numpy == plain and hash(numpy) == hash(plain)
    assert numpy.pairs(50) == plain.matrix(50).sum()


def test_pairs_of_all_small_settings_are_the_sums_of_their_rows():
  for n, size in itertools.product((1, 2, 17), (1, 2, 5)):
    for pattern in (Local(size), Strided(size), Block(size), Summary(size, 1)):
      rows = [len(pattern.keys(i, n)) for i in range(n)]
      assert pattern.pairs(n) == functools.reduce(int.__add__, rows)


class Even(Pattern):
  """A condition on the key alone: the mask has no axis of queries."""

  def mask(self, q, k):
    return k % 2 == 0


def test_condition_on_one_side_holds_for_all_of_the_other():
  expected = grid("10101 10101 10101 10101 10101")
  np.testing.assert_array_equal(Even().matrix(5), expected)
  np.testing.assert_array_equal(Even().keys(1, 5), [0, 2, 4])
  assert Even().pairs(5) == 15
  assert (Causal() & Even()).pairs(5) == 9
  check_layout(Even(), 21, 4)
