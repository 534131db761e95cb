"""Tables as text, with aligned columns or in Markdown."""

import sys
from collections.abc import Iterable, Sequence

Row = Sequence[str]


def size(count: int) -> str:
  """Formats a number of bytes in a suitable unit.

  >>> size(3 * 2**29), size(2**20), size(12)
  ('1.50 GiB', '1.00 MiB', '12 B')
  """
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if count >= unit:
      return f"{count / unit:,.2f} {name}"
  return f"{count} B"


def align(rows: Iterable[Row], right_from: int = sys.maxsize) -> str:
  """Formats rows of cells as lines, padded so that columns are aligned.

  Args:
    rows: rows of cells. If a row has fewer cells than the others, its last cell
      is a remark, which may be long and does not widen any column.
    right_from: the index of the first column that is right-aligned.

  >>> print(align([("name", "size"), ("a", "1,024"), ("and 7 more",)], 1))
  name   size
  a     1,024
  and 7 more
  """
  rows = list(rows)
  widths = [0] * max(map(len, rows), default=0)
  for row in rows:
    # A remark does not belong to a column.
    is_full = len(row) == len(widths)
    for i, cell in enumerate(row if is_full else row[:-1]):
      widths[i] = max(widths[i], len(cell))

  lines = []
  for row in rows:
    cells = []
    for i, cell in enumerate(row):
      pad = cell.rjust if i >= right_from else cell.ljust
      cells.append(pad(widths[i]))
    lines.append("  ".join(cells).rstrip())
  return "\n".join(lines)


def markdown(rows: Iterable[Row]) -> str:
  r"""Formats rows as a Markdown table.

  Args:
    rows: rows with equally many cells; the first row contains the titles.

  >>> print(markdown([("name", "size"), ("a|b", "1,024")]), end="")
  | name | size |
  |---|---|
  | a\|b | 1,024 |
  """
  lines = []
  for row in rows:
    # Escape bars, because a bar would begin the next cell.
    cells = [cell.replace("|", "\\|") for cell in row]
    lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 1:
      lines.append("|---" * len(cells) + "|")
  return "\n".join(lines) + "\n"
