"""Sheets of images show each image in its colors."""

import math

import numpy as np
import pytest
from PIL import Image

from sparse_transformer import data
from sparse_transformer.training.evaluation import samples


def page_of(path, source, tokens, mode):
  """The pixels of a sheet with these samples, in a mode of Pillow."""
  drawn, real = tokens.astype(np.uint8)
  samples.save_images(path, drawn, real, source)
  with Image.open(path) as image:
    return np.asarray(image.convert(mode))


@pytest.mark.parametrize(
  "num, shape, vocab_size",
  [
    (1, (8, 8, 1), 17),
    (3, (4, 6, 3), 256),
  ],
)
def test_sheet_shows_each_image_in_its_colors(num, shape, vocab_size, tmp_path):
  source = data.Images(shape, vocab_size, load=dict)
  size = (2, num, math.prod(shape))
  tokens = np.random.RandomState(0).randint(0, vocab_size, size)
  page = page_of(tmp_path / "samples.png", source, tokens, "RGB")
  rows, columns, _ = shape
  side = math.ceil(math.sqrt(num))
  scale = samples.SHEET // (side * columns)
  cell_height = scale * rows + 2 + samples.BORDER
  cell_width = scale * columns + 2 + samples.BORDER
  width = side * cell_width
  assert page.shape[0] == side * cell_height + samples.LABEL
  assert page.shape[1] == 2 * width + samples.GAP

  images = tokens.reshape(2, num, *shape) * (255 / (vocab_size - 1))
  for half in range(2):
    left = half * (width + samples.GAP)
    label = page[: samples.LABEL, left : left + 60]
    assert (label < 255).any()
    for i in range(num):
      row, column = divmod(i, side)
      y = samples.LABEL + row * cell_height + 1
      x = left + column * cell_width + 1
      frame = page[y - 1, x - 1 : x + scale * columns]
      assert (frame < 255).all()
      pixels = page[y:, x:][: scale * rows : scale, : scale * columns : scale]
      expected = np.broadcast_to(images[half, i].round(), pixels.shape)
      np.testing.assert_array_equal(pixels, expected)


def test_clip_is_shown_with_its_frames_side_by_side(tmp_path):
  clips = np.random.RandomState(0).randint(0, 256, (2, 3, 5 * 16))
  source = data.Images((20, 4, 1), 256, load=dict)
  page = page_of(tmp_path / "samples.png", source, clips, "L")
  scale = samples.SHEET // 20
  height = scale * 4 + 2 + samples.BORDER
  for i in range(3):
    top = samples.LABEL + 1 + i * height
    pixels = page[top::scale, 1::scale][:4, :20]
    frames = clips[0, i].reshape(5, 4, 4)
    np.testing.assert_array_equal(pixels, np.concatenate(frames, axis=1))
