"""Curves go through the points they are drawn from."""

import numpy as np
from PIL import Image

from sparse_transformer.figures import curves

TRAIN = [
  dict(step=step, split="train", bits_per_dim=4 - step / 10) for step in (1, 2)
]
TRAIN[1]["tokens_per_second"] = 7.0
LINES = [*TRAIN, dict(step=2, split="validation", bits_per_dim=3.5)]


def test_curves_of_runs_go_through_their_points():
  runs = {"dense": LINES, "local": TRAIN}
  (axis,) = curves.bits_by_step(runs, "bits/dim").axes
  found = {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
  train = [[1, 3.9], [2, 3.8]]
  assert found == {
    "dense train": train,
    "dense validation": [[2, 3.5]],
    "local train": train,
  }


def test_throughput_leaves_out_lines_without_it():
  (axis,) = curves.throughput_by_step(LINES).axes
  assert [line.get_xydata().tolist() for line in axis.lines] == [[[2, 7]]]


def test_positions_that_are_not_scored_are_left_out(tmp_path):
  bits_L = np.random.RandomState(0).rand(200)
  bits_L[:7] = bits_L[50] = np.nan
  means = curves._mean_of_blocks(bits_L, 3)
  assert np.isnan(means[:2]).all()
  expected = [np.nanmean(bits_L[i : i + 3]) for i in range(6, 200, 3)]
  np.testing.assert_allclose(means[2:], expected)
  result = dict(split="test", step=3, min_context=0, bits_per_dim=0.5)
  path = tmp_path / "positions.png"
  curves.save_positions(path, bits_L, result | dict(unit="bits/byte"))
  with Image.open(path) as image:
    assert image.width > image.height > 100
