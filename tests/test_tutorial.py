"""The tutorial runs, in a short form, and its stored outputs are complete."""

import json
import re

import pytest
from helpers import runs

TUTORIAL = runs.REPO / "docs" / "tutorial.ipynb"
# So few steps that it validates after the last one only.
SHORT = {
  "STEPS": 4,
  "LAYERS": 2,
  "SIDE": 16,
}
MAX_BYTES = 500_000


def code_cells():
  cells = json.loads(TUTORIAL.read_text())["cells"]
  return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.docs
def test_tutorial_runs(tmp_path):
  script = "\n\n".join("".join(cell["source"]) for cell in code_cells())
  for name, value in SHORT.items():
    script, count = re.subn(rf"(?m)^{name} = \d+", f"{name} = {value}", script)
    assert count == 1, name
  settings = dict(
    PYTHONPATH=runs.REPO,
    TMPDIR=tmp_path,
    MPLBACKEND="agg",
  )
  done = runs.python("-c", script, cwd=tmp_path, **settings)

  assert done.returncode == 0, done.stderr
  assert "Local(8), Bishop(8): everything after 3 layers" in done.stdout
  assert list(tmp_path.glob("*/samples.png"))


def test_stored_outputs_are_those_of_one_complete_run():
  assert TUTORIAL.stat().st_size < MAX_BYTES
  cells = code_cells()
  counts = [cell["execution_count"] for cell in cells]
  assert counts == [*range(1, len(cells) + 1)], "make tutorial"
  outputs = [output for cell in cells for output in cell["outputs"]]
  assert not [x for x in outputs if x["output_type"] == "error"]
  # On slow machines, training prints its progress every 30 seconds.
  lines = ["".join(x["text"]) for x in outputs if x.get("name") == "stderr"]
  assert all(re.fullmatch(r"(step \d+ of 300\n)+", x) for x in lines), lines
  assert sum("image/png" in x.get("data", {}) for x in outputs) == 4
