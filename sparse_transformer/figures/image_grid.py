"""Sheets of sampled images next to real ones."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np

from sparse_transformer import atomic


def save_images(
  path: str | os.PathLike,
  samples: np.ndarray,
  real: np.ndarray,
  shape: Sequence[int],
  vocab_size: int,
) -> None:
  """Writes a PNG file with sampled images on the left, real ones on the right.

  Both are uint8 [images, positions], of a shape (rows, columns, channels).
  """
  from PIL import Image

  sheets = [_sheet(tokens, shape, vocab_size) for tokens in (samples, real)]
  gap = np.full((sheets[0].shape[0], shape[1] // 2, 3), 255, np.uint8)
  sheet = np.concatenate([sheets[0], gap, sheets[1]], axis=1)
  scale = max(1, 960 // sheet.shape[1])
  large = sheet.repeat(scale, 0).repeat(scale, 1)
  with atomic.writing(pathlib.Path(path)) as new:
    Image.fromarray(large).save(new, format="PNG")


def _sheet(tokens, shape, vocab_size):
  """An RGB image of all images in a square, with white lines between them."""
  side = int(np.ceil(np.sqrt(len(tokens))))
  rows, columns, _ = shape
  images = tokens.reshape(-1, *shape).astype(float) * 255 / (vocab_size - 1)
  images = np.broadcast_to(images, (len(tokens), rows, columns, 3))
  padding = ((0, side**2 - len(tokens)), (0, 1), (0, 1), (0, 0))
  cells = np.pad(images, padding, constant_values=255)
  cells = cells.reshape(side, side, rows + 1, columns + 1, 3).swapaxes(1, 2)
  return cells.reshape(side * (rows + 1), -1, 3).round().astype(np.uint8)
