"""Curves go through the points they are drawn from, and stay in the frame."""

import numpy as np
import pytest

from sparse_transformer.figures import curves

TRAIN = [
  dict(
    step=step,
    split="train",
    bits_per_dim=4 - step / 10,
  )
  for step in (1, 2)
]
LINES = [*TRAIN, dict(step=2, split="validation", bits_per_dim=3.5)]
NOT_FINITE = dict(
  step=3,
  split="train",
  bits_per_dim=np.nan,
)

RESULT = dict(
  split="test",
  step=3,
  min_context=0,
  unit="bits/dim",
)
RESULT["overrides"] = {"attention.pattern": "dense"}


def draw(figure):
  """The only axes of a figure, which is drawn: a warning would be an error."""
  figure.draw_without_rendering()
  (axis,) = figure.axes
  return axis


def points(axis):
  """The points of each curve."""
  return [line.get_xydata().tolist() for line in axis.lines]


def of_positions(bits_L, min_context):
  """The axes of bits by position."""
  result = RESULT | dict(min_context=min_context)
  known = np.isfinite(bits_L).any()
  result["bits_per_dim"] = np.nanmean(bits_L) if known else None
  return draw(curves.bits_by_position(bits_L, result))


def test_curves_of_a_run_go_through_their_points():
  axis = draw(curves.bits_by_step(LINES, "bits/dim"))
  assert points(axis) == [[[1, 3.9], [2, 3.8]], [[2, 3.5]]]
  names = [text.get_text() for text in axis.get_legend().texts]
  assert names == ["train", "validation"]


@pytest.mark.parametrize(
  "lines", [[], TRAIN[:1], [NOT_FINITE], [*LINES, NOT_FINITE], [NOT_FINITE] * 2]
)
def test_any_lines_can_be_drawn(lines):
  axis = draw(curves.bits_by_step(lines, "bits/dim"))
  assert np.isfinite([*axis.get_xlim(), *axis.get_ylim()]).all()


@pytest.mark.parametrize("min_context", [0, 7, 128])
def test_only_positions_that_every_window_scores_are_drawn(min_context):
  bits_L = np.linspace(2, 1, 512)
  bits_L[:min_context] = 9  # of the first window alone
  axis = of_positions(bits_L, min_context)
  dots, means, _ = points(axis)
  expected = [[i + 1, bits_L[i]] for i in range(min_context, 512)]

  np.testing.assert_allclose(dots, expected)
  assert min(x for x, _ in means) > min_context
  assert axis.get_ylim()[1] < 4
  assert ("at least" in axis.get_xlabel()) == (min_context > 0)


@pytest.mark.parametrize(
  "n, min_context",
  [
    (1, 0),
    (2, 1),
    (64, 0),
    (1000, 100),
  ],
)
def test_means_are_of_blocks_that_cover_all_positions(n, min_context):
  _, means, _ = points(of_positions(np.full(n, 2.0), min_context))
  end = min_context
  for center, bits in means:
    end = 2 * center - 1 - end  # each begins where the one before it ended
    assert bits == 2
  assert end == n
  assert len(means) <= 64


def test_positions_that_are_not_scored_are_left_out():
  bits_L = np.random.RandomState(0).rand(200)
  bits_L[:7] = np.nan
  bits_L[50] = np.nan
  dots, _, _ = points(of_positions(bits_L, 0))
  assert np.isnan([bits for _, bits in dots]).sum() == 8

  means = curves._mean_of_blocks(bits_L, np.arange(0, 200, 3))
  assert np.isnan(means[:2]).all()
  expected = [np.nanmean(bits_L[i : i + 3]) for i in range(6, 200, 3)]
  np.testing.assert_allclose(means[2:], expected)


def test_nothing_that_is_scored_can_be_drawn():
  of_positions(np.full(50, np.nan), min_context=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
  "rows, columns",
  [
    (8, 8),
    (32, 2),
    (2, 64),
  ],
)
def test_bits_by_pixel_have_the_shape_of_the_image(rows, columns, channels):
  shape = (rows, columns, channels)
  bits_L = np.random.RandomState(0).rand(np.prod(shape))
  bits_L[7] = np.nan
  result = RESULT | dict(bits_per_dim=0.5)
  figure = curves.bits_by_pixel(bits_L, shape, result)
  figure.draw_without_rendering()
  *panels, bar = figure.axes
  assert bar.get_ylabel() == "bits/dim"
  assert panels[0].get_ylabel() == "row"
  titles = [panel.get_title() for panel in panels]
  assert titles == (["red", "green", "blue"] if channels == 3 else [""])

  limits = set()
  for channel, panel in enumerate(panels):
    (image,) = panel.images
    expected = bits_L[channel::channels].reshape(rows, columns)
    np.testing.assert_array_equal(image.get_array().filled(np.nan), expected)
    limits.add(image.get_clim())
  assert len(limits) == 1  # one bar is for all channels
