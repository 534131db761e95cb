"""HTML pages that stand alone: pictures inside, nothing is loaded."""

import base64
import html
import io
import pathlib

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


def page(title, *sections):
  """A whole page; sections: HTML, as the functions below make it."""
  title, body = html.escape(title), "\n".join(sections)
  return (
    '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    f"<title>{title}</title>\n"
    '<link rel="icon" href="data:,">\n'
    f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
    "</body>\n</html>\n"
  )


def section(title, *parts):
  return f"<h2>{html.escape(title)}</h2>\n" + "\n".join(parts)


def note(text):
  return f'<p class="note">{html.escape(text)}</p>'


def preformatted(text):
  return f"<pre>{html.escape(text)}</pre>"


def table(rows):
  """The first row holds the titles."""
  first, *rest = ([html.escape(str(cell)) for cell in row] for row in rows)
  lines = ["<tr>" + "".join(f"<th>{x}</th>" for x in first) + "</tr>"]
  lines += [
    "<tr>" + "".join(f"<td>{x}</td>" for x in r) + "</tr>" for r in rest
  ]
  return "<table>\n" + "\n".join(lines) + "\n</table>"


def picture(path, text):
  """A PNG file."""
  return _image(pathlib.Path(path).read_bytes(), text)


def figure(figure, text):
  """A figure of matplotlib, which is closed."""
  from matplotlib import pyplot as plt

  file = io.BytesIO()
  figure.savefig(file, format="png", dpi=110)
  plt.close(figure)
  return _image(file.getvalue(), text)


def _image(data, text):
  encoded = base64.b64encode(data).decode()
  return (
    f'<img alt="{html.escape(text)}" src="data:image/png;base64,{encoded}">'
  )
