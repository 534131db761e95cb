"""Self-contained HTML pages: pictures are embedded, and nothing is loaded."""

import base64
import html
import io
import os
import pathlib
from collections.abc import Iterable, Sequence

from sparse_transformer.figures import style

SHRINK = 0.75  # least width of a shrunken figure, relative to its own

# What may be wider than a phone is in a box that scrolls; the page does not.
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b2733; margin: 2rem auto;
  max-width: 76rem; padding: 0 .75rem; overflow-wrap: anywhere;
  -webkit-text-size-adjust: 100%; text-size-adjust: 100%; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.table, .picture { overflow-x: auto; margin: 1rem 0; }
.picture { display: inline-block; max-width: 100%; vertical-align: top; }
img { display: block; max-width: 100%; }
table { border-collapse: collapse; overflow-wrap: break-word;
  font-size: .875rem; }
td, th { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid #dde; font-variant-numeric: tabular-nums; }
tr :first-child { position: sticky; left: 0; background: #fff;
  max-width: min(50vw, 24rem); }
tr :nth-child(2):last-child { overflow-wrap: anywhere; }
td + td:not(:last-child), td + td + td { white-space: nowrap; }
pre { background: #f4f6f9; padding: .75rem; white-space: pre-wrap; }
pre, .note { font-size: 14px; } .note { color: #566475; }
"""


def page(title: str, *sections: str) -> str:
  """An HTML document; the functions below create its sections."""
  title, body = html.escape(title), "\n".join(sections)
  return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><style>{STYLE}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def section(title: str, *parts: str) -> str:
  """A heading and what follows it."""
  return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def note(text: str) -> str:
  """A paragraph in small gray type."""
  return f'<p class="note">{html.escape(text)}</p>'


def preformatted(text: str) -> str:
  """Text whose line breaks and spaces are preserved."""
  return f"<pre>{html.escape(text)}</pre>"


def table(rows: Iterable[Sequence[object]]) -> str:
  """A table in a box that scrolls; the first row contains the titles."""
  titles, *rest = rows
  lines = [_row("th", titles), *(_row("td", row) for row in rest)]
  return '<div class="table"><table>\n' + "\n".join(lines) + "\n</table></div>"


def _row(tag, cells):
  cells = (f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
  return f"<tr>{''.join(cells)}</tr>"


def figure(figure: "style.Figure", text: str) -> str:
  """`picture` of a matplotlib figure."""
  figure.savefig(file := io.BytesIO(), format="png")
  return picture(file, text)


def picture(file: str | os.PathLike | io.BytesIO, text: str) -> str:
  """A PNG file in a box that scrolls, with alternative text.

  One with a resolution gets its printed size, and shrinks by at most a quarter.

  Raises:
    OSError: the file is not an image.
  """
  from PIL import Image

  if not isinstance(file, io.BytesIO):
    path = pathlib.Path(file)  # which may be a pipe that never ends
    data = io.BytesIO(path.read_bytes() if path.is_file() else b"")
  else:
    data = file
  try:
    with Image.open(data) as image:
      width, resolution = image.width, image.info.get("dpi")
  except OSError:
    raise OSError(f"{file} is not a picture; delete it") from None
  size = ""
  if resolution:
    inches = width / resolution[0]
    size = f'style="width: {inches:.2f}in; min-width: {SHRINK * inches:.2f}in" '
  encoded = base64.b64encode(data.getvalue()).decode()
  return (
    f'<div class="picture"><img alt="{html.escape(text)}" {size}'
    f'src="data:image/png;base64,{encoded}"></div>'
  )
