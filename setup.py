"""Makes the long description of README.md; all else is in pyproject.toml.

Links of README.md lead to files beside it, which whoever reads the description
elsewhere does not have: there, they lead to the files of the release.
"""

import pathlib
import re
import tomllib

from setuptools import setup

FOLDER = pathlib.Path(__file__).resolve().parent
# A link or a picture with a path; not with an address, or a heading.
TO_FILE = re.compile(r"\]\((?!https?:|#)([^)]*)\)")


def describe() -> str:
  """Returns README.md with addresses in place of paths."""
  project = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]
  repository = project["urls"]["Repository"]
  init = (FOLDER / "sparse_transformer" / "__init__.py").read_text()
  version = re.search(r'__version__ = "(.*)"', init)[1]

  def address(link):
    # A picture is shown as it is, and another file in a page about it.
    view = "raw" if link[1].endswith(".png") else "blob"
    return f"]({repository}/{view}/v{version}/{link[1]})"

  return TO_FILE.sub(address, (FOLDER / "README.md").read_text())


if __name__ == "__main__":
  setup(
    long_description=describe(),
    long_description_content_type="text/markdown",
  )
