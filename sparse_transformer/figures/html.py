"""Self-contained HTML pages: pictures are embedded, and nothing is loaded."""

import base64
import html
import io
import os
import pathlib
import typing
from collections.abc import Iterable, Sequence

if typing.TYPE_CHECKING:
  import matplotlib.figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b2733; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
img { max-width: 100%; image-rendering: auto; }
table { border-collapse: collapse; margin: 1rem 0; }
td, th { padding: .2rem .8rem; text-align: left; border-bottom: 1px solid #dde;
  font-variant-numeric: tabular-nums; }
pre { background: #f4f6f9; padding: 1rem; overflow-x: auto; font-size: 13px; }
.note { color: #667; font-size: 13px; }
"""


def page(title: str, *sections: str) -> str:
  """An HTML document; the functions below create its sections."""
  title, body = html.escape(title), "\n".join(sections)
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f"<title>{title}</title>\n"
    '<link rel="icon" href="data:,">\n'
    f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
    "</body>\n</html>\n"
  )


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
  """A table; the first row contains the titles."""
  titles, *rest = rows
  lines = [_row("th", titles), *(_row("td", row) for row in rest)]
  return "<table>\n" + "\n".join(lines) + "\n</table>"


def _row(tag, cells):
  cells = (f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
  return f"<tr>{''.join(cells)}</tr>"


def picture(path: str | os.PathLike, text: str) -> str:
  """A PNG file, with alternative text."""
  return _image(pathlib.Path(path).read_bytes(), text)


def figure(figure: "matplotlib.figure.Figure", text: str) -> str:
  """A matplotlib figure, with alternative text."""
  file = io.BytesIO()
  figure.savefig(file, format="png")
  return _image(file.getvalue(), text)


def _image(data, text):
  encoded = base64.b64encode(data).decode()
  return (
    f'<img alt="{html.escape(text)}" src="data:image/png;base64,{encoded}">'
  )
