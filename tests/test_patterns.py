import functools
import itertools
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from sparse_transformer import patterns
from sparse_transformer.patterns import (
  Block,
  Causal,
  Local,
  Pattern,
  Strided,
  Summary,
)

SETTINGS = dict(stride=8, window=8, width=2, num_summaries=1)


class Thirds(Pattern):
  """A pattern of a user: the query's third multiples, two rows back."""

  def mask(self, q, k):
    return (k <= q) & (k * 2 % 3 == q % 3) & ((q - k) // 4 != 1)


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


PATTERNS = [
  Causal(),
  Local(5),
  Strided(6),
  Block(7),
  Summary(7, 2),
  Summary(7, 2, 2),
  Local(6) | Strided(6),
  Block(7) | Summary(7, 3),
  Causal() - Local(4),
  Thirds(),
]


def compositions():
  """Random patterns: those above, combined by | & -."""
  combine = [Pattern.__or__, Pattern.__and__, Pattern.__sub__]
  return st.recursive(
    st.sampled_from(PATTERNS),
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
@pytest.mark.parametrize("name", ["dense", "strided", "fixed"])
def test_every_named_factorization_reaches_its_whole_past(name, mode):
  assigned = patterns.assign(name, mode, num_layers=2, num_heads=2, **SETTINGS)
  assert reaches_all(assigned)


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
    (lambda: Local(0), ["Local(window=0)", "at least 1"]),
    (lambda: Strided(-3), ["Strided(stride=-3)", "at least 1"]),
    (lambda: Block(2.5), ["Block(size=2.5)", "integer"]),
    (lambda: Block(True), ["size", "integer"]),
    (lambda: Summary(8, 9), ["Summary(size=8, width=9, shift=0)", "at most"]),
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
