"""Tables as text: aligned columns, and Markdown."""

import sys
from collections.abc import Iterable, Sequence

Row = Sequence[str]


def size(count: int) -> str:
  """Bytes in a suitable unit.

  >>> size(3 * 2**29), size(2**20), size(12)
  ('1.50 GiB', '1.00 MiB', '12 B')
  """
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if count >= unit:
      return f"{count / unit:,.2f} {name}"
  return f"{count} B"


def align(rows: Iterable[Row], right_from: int = sys.maxsize) -> str:
  """Lines of cells, padded so that columns line up.

  Args:
    rows: of cells. A row may have fewer cells than the others; its last cell
      may then be a remark of any length, which widens no column.
    right_from: the index of the first column that is right-aligned.

  >>> print(align([("name", "size"), ("a", "1,024"), ("and 7 more",)], 1))
  name   size
  a     1,024
  and 7 more
  """
  rows = list(rows)
  widths = [0] * max(map(len, rows), default=0)
  for row in rows:
    # A remark may be long, and belongs to no column.
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
  r"""A Markdown table.

  Args:
    rows: the first one contains the titles; all have as many cells.

  >>> print(markdown([("name", "size"), ("a|b", "1,024")]), end="")
  | name | size |
  |---|---|
  | a\|b | 1,024 |
  """
  lines = []
  for row in rows:
    # A bar would begin the next cell.
    cells = [cell.replace("|", "\\|") for cell in row]
    lines.append(f"| {' | '.join(cells)} |")
    if len(lines) == 1:
      lines.append("|---" * len(cells) + "|")
  return "\n".join(lines) + "\n"
