"""Docs show the catalogue of patterns and the config fields as they are."""

import numpy as np
import pytest
from helpers import content, examples, runs
from PIL import Image

from docs import make as gallery

pytestmark = pytest.mark.tools

DOCS = runs.REPO / "docs"
HINT = "what the page shows has changed: make docs"


@pytest.mark.parametrize("name", gallery.PAGES)
def test_page_shows_what_it_is_made_from(name):
  assert gallery.fill(DOCS / name) == (DOCS / name).read_text(), HINT


def test_each_pattern_has_a_picture_and_there_are_no_others():
  shown = gallery.drawn()
  folder = DOCS / gallery.PICTURES
  expected = {gallery.file_name(pattern): pattern for pattern in shown}
  assert len(expected) == len(shown)
  assert {path.name for path in folder.iterdir()} == set(expected), HINT
  for name, pattern in expected.items():
    with Image.open(folder / name) as image:
      pixels = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(pixels, gallery.picture(pattern), HINT)


def test_patterns_that_follow_the_content_are_drawn_for_the_given_input():
  vectors, centers = gallery.given_input()
  q = vectors[None, :, None]
  i = np.arange(gallery.POSITIONS)
  for name, shown in examples.CONTENT.items():
    # What a caller selects does not follow from the input.
    for pattern in shown if name != "Selected" else ():
      found = gallery.realize(pattern).mask(i[:, None], i)
      expected = content.by_definition(pattern, q, q, centers[None])
      np.testing.assert_array_equal(found, expected[0, 0])
