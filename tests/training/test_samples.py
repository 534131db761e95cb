"""Sheets of images show each image in its colors."""

import numpy as np
import pytest
from PIL import Image

from sparse_transformer import data
from sparse_transformer.training.evaluation.samples import save_images


@pytest.mark.parametrize(
  "num, shape, vocab_size", [(1, (8, 8, 1), 17), (3, (4, 6, 3), 256)]
)
def test_sheet_shows_each_image_in_its_colors(num, shape, vocab_size, tmp_path):
  path = tmp_path / "samples.png"
  shapes = 2, num, int(np.prod(shape))
  tokens = np.random.RandomState(0).randint(0, vocab_size, shapes)
  tokens = tokens.astype(np.uint8)
  save_images(path, *tokens, data.Images(shape, vocab_size, load=dict))
  rows, columns, _ = shape
  side = int(np.ceil(np.sqrt(num)))
  with Image.open(path) as image:
    width = 2 * side * (columns + 1) + columns // 2
    scale = image.width // width
    assert image.size == (scale * width, scale * side * (rows + 1))
    sheet = np.asarray(image.convert("RGB"))[::scale, ::scale]
  images = tokens.reshape(2, num, *shape) * (255 / (vocab_size - 1))
  for half in range(2):
    left = half * (side * (columns + 1) + columns // 2)
    for i in range(num):
      y, x = i // side * (rows + 1), left + i % side * (columns + 1)
      found = sheet[y : y + rows, x : x + columns]
      expected = np.broadcast_to(images[half, i].round(), found.shape)
      np.testing.assert_array_equal(found, expected)
