"""Tests of plots.py: files that open and show what they should."""

import numpy as np
import pytest
import runs
from PIL import Image

from sparse_transformer import patterns
from sparse_transformer.figures import plots

SETTINGS = dict(width=2, num_summaries=2)


@pytest.mark.parametrize("name", patterns.FACTORIZATIONS)
@pytest.mark.parametrize("mode", patterns.MODES)
@pytest.mark.parametrize(
  "shape, length", [((8, 8, 1), 64), ((4, 4, 3), 48), ((5, 8), 37)]
)
def test_patterns_are_drawn(name, mode, shape, length, tmp_path, monkeypatch):
  monkeypatch.setattr(plots, "_draw", lambda *args: drawn.append(args))
  drawn = []
  layers = patterns.assign(
    name, mode, num_layers=3, num_heads=4, stride=8, window=8, **SETTINGS
  )
  plots.save_patterns(tmp_path / "p.png", layers, shape, length)
  ((_, titles, distinct, *_),) = drawn
  assert set(distinct) == {p for heads in layers for p in heads}
  assert len(titles) == len(distinct) == len(set(distinct))
  for pattern in distinct:
    row = plots._row(pattern, length, shape[0])
    query = int(np.flatnonzero(row == plots.QUERY).item())
    seen = np.flatnonzero(row.ravel())
    assert set(seen) == {*pattern.keys(query, length), query}
    assert row.shape[0] == shape[0]


@pytest.mark.parametrize(
  "name, mode, shape, length, stride",
  [
    ("strided", "interleaved", (8, 8, 1), 64, 8),
    ("fixed", "merged", (96, 128), 12_288, 128),
    ("fixed", "heads", (5, 8), 37, 8),
  ],
)
def test_picture_of_patterns_opens(name, mode, shape, length, stride, tmp_path):
  layers = patterns.assign(
    name,
    mode,
    num_layers=2,
    num_heads=4,
    stride=stride,
    window=stride,
    **SETTINGS,
  )
  path = tmp_path / "patterns.png"
  plots.save_patterns(path, layers, shape, length)
  with Image.open(path) as image:
    panels = len({p for heads in layers for p in heads})
    assert image.width == 320 * panels and image.height == 660
    shown = {color for _, color in image.convert("RGB").getcolors(1 << 24)}
  assert set(plots.COLORS) <= shown


class Around(patterns.Pattern):
  """A pattern of a user that is not causal: keys around the query."""

  def mask(self, q, k):
    return (q - k <= 3) & (k - q <= 3)


@pytest.mark.parametrize(
  "pattern", [Around(), patterns.Strided(5), patterns.Causal() - Around()]
)
@pytest.mark.parametrize("n", [5, 64, 256, 300])
def test_matrix_shows_every_pair(pattern, n, monkeypatch):
  monkeypatch.setattr(plots, "MAX_CELLS", 64)
  painted = plots._matrix(pattern, n)
  size = -(-n // 64)
  cells = -(-n // size)
  assert painted.shape == (cells, cells, 3) and painted.dtype == np.uint8
  rows, columns = np.nonzero(pattern.matrix(n) | np.eye(n, dtype=bool))
  shown = np.zeros((cells, cells), bool)
  shown[rows // size, columns // size] = True
  np.testing.assert_array_equal((painted != 255).any(-1), shown)
  diagonal = painted[np.arange(cells), np.arange(cells)]
  assert (diagonal == plots.COLORS[plots.QUERY]).all()


def test_cells_that_join_keep_the_share_of_keys():
  cells = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 2]])
  white, key, query = plots.COLORS
  painted = plots._paint(cells, 2, 2)
  half = 1 - (1 - plots.PALEST) / 2  # one of two at the cut border
  pale = [round(255 - half * (255 - x)) for x in key]
  np.testing.assert_array_equal(painted, [[key, white], [pale, query]])


def test_hundreds_of_patterns_fill_one_picture(tmp_path):
  layers = tuple((patterns.Local(w),) for w in range(1, 200))
  plots.save_patterns(tmp_path / "p.png", layers, (8, 8, 1), 64)
  with Image.open(tmp_path / "p.png") as image:
    assert image.width == 320 * plots.MAX_PANELS


def test_million_positions_are_drawn(tmp_path):
  layers = ((patterns.Local(1024) | patterns.Strided(1024), Around()),)
  plots.save_patterns(tmp_path / "p.png", layers, (1024, 1024), 2**20)
  chosen = [Around()]
  plots.save_patterns(tmp_path / "q.png", layers, (1024, 1024), 2**20, chosen)
  with (
    Image.open(tmp_path / "p.png") as both,
    Image.open(tmp_path / "q.png") as one,
  ):
    assert (both.width, one.width) == (640, 320)


def test_command_draws_the_picture_of_the_readme(tmp_path):
  path = tmp_path / "patterns.png"
  assert runs.command("sparse_transformer/plots.py", path) == 0
  with Image.open(path) as image:
    assert image.width == 320 * len(patterns.FACTORIZATIONS)
  assert runs.command("sparse_transformer/plots.py") == 1


@pytest.mark.parametrize(
  "shape, vocab_size", [((8, 8, 1), 17), ((4, 6, 3), 256)]
)
@pytest.mark.parametrize("num", [1, 3, 4])
def test_sheet_shows_each_image_in_its_colors(shape, vocab_size, num, tmp_path):
  path = tmp_path / "samples.png"
  shapes = 2, num, int(np.prod(shape))
  tokens = np.random.RandomState(0).randint(0, vocab_size, shapes)
  tokens = tokens.astype(np.uint8)
  plots.save_images(path, *tokens, shape, vocab_size)
  rows, columns, channels = shape
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
