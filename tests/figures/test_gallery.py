"""Docs show the catalogue of patterns and the config fields as they are."""

import content
import numpy as np
import pytest
import runs
from PIL import Image

from sparse_transformer import patterns
from sparse_transformer.figures import gallery

DOCS = runs.REPO / "docs"
HINT = "what the page shows has changed: make docs"


@pytest.mark.parametrize("name", gallery.PAGES)
def test_page_shows_what_it_is_made_from(name):
  assert gallery.fill(DOCS / name) == (DOCS / name).read_text(), HINT


def test_each_pattern_has_a_picture_and_there_are_no_others():
  expected = {
    gallery.file_name(pattern): pattern for pattern in gallery.drawn()
  }
  found = {path.name for path in (DOCS / gallery.PICTURES).iterdir()}
  assert found == set(expected), HINT
  for name, pattern in expected.items():
    with Image.open(DOCS / gallery.PICTURES / name) as image:
      pixels = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(pixels, gallery.picture(pattern), HINT)


def test_patterns_have_files_of_their_own():
  shown = list(gallery.drawn())
  assert len({gallery.file_name(pattern) for pattern in shown}) == len(shown)


@pytest.mark.parametrize(
  "pattern",
  [patterns.Strided(5, causal=False), patterns.BigBird(4)],
  ids=str,
)
def test_cells_of_a_picture_are_pairs(pattern):
  n = gallery.POSITIONS
  matrix = gallery.picture(pattern)[-1 - n * gallery.CELL : -1, 1:-1]
  cells = matrix[:: gallery.CELL, :: gallery.CELL]
  is_drawn = (cells != 255).any(-1)
  expected = pattern.matrix(n) | np.eye(n, dtype=bool)
  np.testing.assert_array_equal(is_drawn, expected)


def test_costs_on_the_page_are_those_of_the_patterns():
  n = min(gallery.LENGTHS)
  page = (DOCS / "patterns.md").read_text()
  for examples in patterns.examples().values():
    mean = examples.large.pairs(n) / n
    text = str(examples.large).replace("|", "\\|")
    assert f"| `{text}` | {mean:,.1f} |" in page


def test_patterns_that_follow_the_content_are_drawn_for_the_given_input():
  assert set(gallery.OF_CONTENT) == set(patterns.CONTENT)
  vectors, centers = gallery.given_input()
  q = vectors[None, :, None]
  i = np.arange(gallery.POSITIONS)
  for name in gallery.OF_CONTENT:
    for pattern in gallery._small(name):
      found = gallery.realize(pattern).mask(i[:, None], i)
      expected = content.by_definition(pattern, q, q, centers[None])
      np.testing.assert_array_equal(found, expected[0, 0])
