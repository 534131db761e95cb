"""Adapts the pages, which are written for GitHub, to the site."""

import json
import pathlib
import re

from mkdocs.structure.files import File


def on_config(config):
  """Puts the version into the title."""
  path = pathlib.Path(config.config_file_path).parent
  text = (path / "sparse_transformer" / "__init__.py").read_text()
  config.site_name += " " + re.search(r'__version__ = "(.*)"', text)[1]
  return config


def on_files(files, config):
  """Replaces each notebook by a page."""
  for file in list(files):
    if file.src_uri.endswith(".ipynb"):
      page = _page(json.loads(file.content_string))
      name = file.src_uri.replace(".ipynb", ".md")
      files.remove(file)
      files.append(File.generated(config, name, content=page))
  return files


def on_page_markdown(markdown, **_):
  """Adapts links to notebooks and to files outside docs, and code in tables."""
  markdown = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", markdown)
  markdown = re.sub(r"\[([^]]*)\]\(\.\./[^)]*\)", r"\1", markdown)
  # Here a | in code separates no cells, and a \ before it would show.
  return re.sub(r"`[^`\n]+`", lambda x: x[0].replace("\\|", "|"), markdown)


def _page(notebook):
  """A notebook as Markdown."""
  parts = []
  for cell in notebook["cells"]:
    text = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
      parts.append(text)
    else:
      parts += [f"```python\n{text}\n```", *map(_output, cell["outputs"])]
  return "\n\n".join(parts) + "\n"


def _output(output):
  """Printed text, a picture or a value."""
  data = output.get("data", {})
  if "image/png" in data:
    encoded = "".join(data["image/png"]).replace("\n", "")
    return f"![output](data:image/png;base64,{encoded})"
  text = "".join(output.get("text") or data["text/plain"])
  return f"```text\n{text}\n```"
