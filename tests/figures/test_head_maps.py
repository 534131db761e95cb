"""Pictures of heads show their weights."""

import numpy as np
from PIL import Image

from sparse_transformer.figures import head_maps, masks, style

WHITE, PALE, DARK = map(style.rgb, ("#ffffff", style.PALER, style.DARK))


def test_color_is_that_of_a_weight_relative_to_the_largest():
  weights = np.array([[-1, 0, 0.2], [0.1, 0.05, -1]])
  painted = head_maps.paint(weights, weights.max(1, keepdims=True))
  half = (PALE + (DARK - PALE) / 2).round()
  np.testing.assert_array_equal(
    painted, [[WHITE, PALE, DARK], [DARK, half, WHITE]]
  )


def test_picture_has_both_views_of_each_head(tmp_path):
  n = 37  # the last row of the data is not full
  query, matrix = np.full(n, -1.0), np.full((n, n), -1.0)
  query[3], matrix[range(n), range(n)] = 1, 1
  figure = head_maps.panels(
    "a title", ["one", "two"], [(query, matrix)] * 2, (8, 5)
  )
  first, _, below, _ = figure.axes
  in_data = first.get_images()[0].get_array().reshape(-1, 3)
  assert in_data.shape == (40, 3)
  np.testing.assert_array_equal(in_data[3], DARK)
  assert (np.delete(in_data, 3, 0) == WHITE).all()
  shown = below.get_images()[0].get_array()
  np.testing.assert_array_equal((shown == DARK).all(-1), np.eye(n, dtype=bool))
  many = ["head"] * 20, [(query, matrix)] * 20, (8, 5)
  head_maps.panels("a title", *many).savefig(tmp_path / "p.png")
  with Image.open(tmp_path / "p.png") as image:
    assert image.width == 12 * masks.PANEL * style.DPI
