"""The examples of docs/attend.md run, in its order."""

import re

import pytest
import runs

PAGE = runs.REPO / "docs" / "attend.md"


@pytest.fixture(scope="module")
def names():
  return {"__name__": "page"}  # what the examples so far have defined


@pytest.mark.parametrize(
  "heading, code",
  [
    pytest.param(section.partition("\n")[0], code, id=f"{i}")
    for i, section in enumerate(PAGE.read_text().split("\n## "))
    for code in re.findall(r"```python\n(.*?)```", section, re.S)
  ],
)
def test_examples_run(heading, code, names):
  if "import equinox" in code:
    pytest.importorskip("equinox")
  exec(compile(code, f"docs/attend.md, {heading}", "exec"), names)
