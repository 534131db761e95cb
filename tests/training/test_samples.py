"""Sheets of images show each image in its colors."""

import numpy as np
import pytest
from PIL import Image

from sparse_transformer import data
from sparse_transformer.training.evaluation import samples


@pytest.mark.parametrize(
  "num, shape, vocab_size",
  [
    (1, (8, 8, 1), 17),
    (3, (4, 6, 3), 256),
  ],
)
def test_sheet_shows_each_image_in_its_colors(num, shape, vocab_size, tmp_path):
  path = tmp_path / "samples.png"
  shapes = 2, num, int(np.prod(shape))
  tokens = np.random.RandomState(0).randint(0, vocab_size, shapes)
  tokens = tokens.astype(np.uint8)
  samples.save_images(path, *tokens, data.Images(shape, vocab_size, load=dict))
  rows, columns, _ = shape
  side = int(np.ceil(np.sqrt(num)))
  with Image.open(path) as image:
    page = np.asarray(image.convert("RGB"))
  scale = samples.SHEET // (side * columns)
  cells = scale * np.array(shape[:2]) + 2 + samples.BORDER
  height, width = side * cells

  assert page.shape[:2] == (height + samples.LABEL, 2 * width + samples.GAP)
  images = tokens.reshape(2, num, *shape) * (255 / (vocab_size - 1))
  for half in range(2):
    left = half * (width + samples.GAP)
    assert (page[: samples.LABEL, left : left + 60] < 255).any()  # a label
    for i in range(num):
      place = np.divmod(i, side) * cells + (samples.LABEL, left)
      y, x = place + 1
      assert (page[y - 1, x - 1 : x + scale * columns] < 255).all()  # framed
      found = page[y:, x:][: scale * rows : scale, : scale * columns : scale]
      expected = np.broadcast_to(images[half, i].round(), found.shape)
      np.testing.assert_array_equal(found, expected)


def test_clip_is_shown_with_its_frames_side_by_side(tmp_path):
  clips = np.random.RandomState(0).randint(0, 256, (2, 3, 5 * 16))
  source = data.Images((20, 4, 1), 256, load=dict)
  path = tmp_path / "samples.png"
  samples.save_images(path, *clips.astype(np.uint8), source)
  with Image.open(path) as image:
    page = np.asarray(image.convert("L"))
  rows = page[samples.LABEL + 1 :, 1:]
  scale = samples.SHEET // 20
  height = scale * 4 + 2 + samples.BORDER
  for i in range(3):
    found = rows[i * height :: scale][:4, : scale * 20 : scale]
    frames = clips[0, i].reshape(5, 4, 4)
    np.testing.assert_array_equal(found, np.concatenate(frames, axis=1))
