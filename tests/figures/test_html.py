"""Text in pages is escaped, and pictures keep their size."""

import numpy as np
import pytest
from PIL import Image

from sparse_transformer.figures import html, style


def test_all_text_is_escaped():
  name = "<script>alert(1)</script>"
  parts = (
    html.note(name),
    html.preformatted(name),
    html.table([(name, "x & y")]),
  )
  page = html.page(name, html.section(name, *parts))
  assert "<script" not in page and "x &amp; y" in page
  assert '<meta name="viewport" content="width=device-width' in page


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
