"""Pictures of patterns show the pairs of the patterns, and nothing else."""

import numpy as np
import pytest
from helpers import catalogue
from PIL import Image

from sparse_transformer import patterns
from sparse_transformer.figures import masks as pictures, style

WHITE, KEY, QUERY = map(style.rgb, ("#ffffff", style.LIGHT, style.DARK))


def pixels(path):
  with Image.open(path) as image:
    return np.asarray(image.convert("RGB"))


def colors_of_cells(figure, path):
  """The color at each cell's center in the saved figure, for each axes."""
  figure.savefig(path)
  picture = pixels(path)
  for axes in figure.axes:
    rows, columns = axes.get_images()[0].get_array().shape[:2]
    y, x = np.mgrid[:rows, :columns]
    centers = np.stack([x.ravel(), y.ravel()], axis=1)
    left, up = axes.transData.transform(centers).astype(int).T
    found = picture[len(picture) - 1 - up, left]
    yield found.reshape(rows, columns, 3)


def colors_of_pairs(matrix):
  """The color of each pair, where none follow the content."""
  colors = np.where(matrix[..., None], KEY, WHITE)
  diagonal = range(len(matrix))
  colors[diagonal, diagonal] = QUERY
  return colors


@pytest.mark.parametrize(
  "shape, n",
  [
    ((8, 8, 1), 64),
    ((4, 4, 3), 48),
    ((3, 16), 37),
  ],
)
def test_saved_picture_shows_each_key_and_each_query(shape, n, tmp_path):
  drawn = catalogue.Around(), patterns.Strided(5), patterns.BigBird(4)
  titles = [str(pattern) for pattern in drawn]
  figure = pictures.panels(titles, drawn, shape, n)
  found = [*colors_of_cells(figure, tmp_path / "p.png")]
  assert len(found) == 6
  query = int(n * 0.71)
  for i, pattern in enumerate(drawn):
    of_query = np.full((np.prod(shape), 3), WHITE)
    of_query[pattern.keys(query, n)] = KEY
    of_query[query] = QUERY
    of_query = of_query.reshape(shape[0], -1, 3)
    np.testing.assert_array_equal(found[i], of_query)

    of_all = colors_of_pairs(pattern.matrix(n))
    np.testing.assert_array_equal(found[3 + i], of_all)


@pytest.mark.parametrize("n", [5, 64, 256, 300])
def test_matrix_shows_every_pair_at_any_size(n, monkeypatch):
  monkeypatch.setattr(pictures, "MAX_CELLS", 64)
  size = -(-n // 64)
  cells = -(-n // size)
  diagonal = range(cells)
  for pattern in catalogue.ALL:
    painted = pictures.image_of_matrix(pattern, n)
    assert painted.shape == (cells, cells, 3)
    assert painted.dtype == np.uint8
    rows, columns = np.nonzero(pattern.matrix(n) | np.eye(n, dtype=bool))
    expected = np.zeros((cells, cells), bool)
    expected[rows // size, columns // size] = True
    is_shown = (painted != WHITE).any(-1)
    np.testing.assert_array_equal(is_shown, expected)
    assert (painted[diagonal, diagonal] == QUERY).all()


def test_joined_cells_show_the_fraction_of_keys():
  cells = np.array(
    [
      [1, 1, 0, 0],
      [1, 1, 0, 0],
      [1, 0, 0, 2],
    ]
  )
  painted = pictures.paint(cells, 2, 2)
  half = 1 - (1 - pictures.PALEST) / 2  # one of two at the cut border
  pale = (255 - half * (255 - KEY)).round()
  np.testing.assert_array_equal(painted, [[KEY, WHITE], [pale, QUERY]])


def test_pairs_that_follow_the_content_have_a_color_of_their_own():
  n = 64
  near = patterns.Local(5)
  far = patterns.Local(20)
  pattern = near | (patterns.LSH(8, 4) & far)
  painted = pictures.image_of_matrix(pattern, n)
  expected = colors_of_pairs(near.matrix(n))
  maybe = far.matrix(n) & ~near.matrix(n)
  expected[maybe] = style.rgb(style.PALE)
  np.testing.assert_array_equal(painted, expected)

  row = pictures.image_of_query(pattern, n, (1, n))[0]
  np.testing.assert_array_equal(row, expected[int(n * 0.71)])


def test_million_positions_are_drawn(tmp_path):
  drawn = patterns.Local(1024) | patterns.Strided(1024)
  layers = ((drawn, drawn),)
  path = tmp_path / "p.png"
  pictures.save_patterns(path, layers, (1024, 1024), 2**20)
  shown = np.unique(pixels(path).reshape(-1, 3), axis=0).tolist()
  assert QUERY.tolist() in shown
  assert KEY.tolist() in shown
