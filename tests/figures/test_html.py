"""Text in pages is escaped, and what is wide scrolls in a box of its own."""

import re

import numpy as np
import pytest
from PIL import Image

from sparse_transformer.figures import html, style


def test_table_escapes_its_cells():
  text = html.table([("a", "<b>"), (1, "x & y")])
  assert "<th>&lt;b&gt;</th>" in text and "<td>x &amp; y</td>" in text


def test_title_headings_and_notes_are_escaped():
  name = "<script>alert(1)</script>"
  parts = html.note(name), html.preformatted(name), html.table([(name,)])
  assert "<script" not in html.page(name, html.section(name, *parts))


def test_page_has_the_width_of_the_device():
  assert '<meta name="viewport" content="width=device-width' in html.page("a")


def test_tables_and_pictures_are_in_boxes_that_scroll():
  figure, _ = style.subplots(1, 1, 4, 3)
  assert '<div class="table"><table>' in html.table([("a", "b")])
  assert '<div class="picture"><img' in html.figure(figure, "a")
  assert re.search(r"\.table, \.picture {[^}]*overflow-x: auto", html.STYLE)


def test_figure_has_the_width_of_paper_and_shrinks_by_a_quarter_at_most():
  figure, _ = style.subplots(1, 1, 4, 3)
  text = html.figure(figure, "<b>")
  assert 'style="width: 4.00in; min-width: 3.00in"' in text
  assert 'alt="&lt;b&gt;"' in text


def test_picture_without_a_resolution_shrinks_as_needed(tmp_path):
  path = tmp_path / "a.png"
  Image.fromarray(np.zeros((4, 900), np.uint8)).save(path)
  assert "min-width" not in html.picture(path, "a")


def test_damaged_picture_is_named(tmp_path):
  path = tmp_path / "a.png"
  path.write_bytes(b"no picture")
  with pytest.raises(OSError, match="a.png"):
    html.picture(path, "a")
