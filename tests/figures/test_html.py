"""Text in pages is escaped."""

from sparse_transformer.figures import html


def test_table_escapes_its_cells():
  text = html.table([("a", "<b>"), (1, "x & y")])
  assert "<th>&lt;b&gt;</th>" in text and "<td>x &amp; y</td>" in text
