"""Optional rooms can be deleted: the rest imports, and trains."""

import ast
import os
import shutil

import pytest
from helpers import runs
from helpers.cases import soak

from sparse_transformer import patterns
from sparse_transformer.model import options

# Modules, by what the lines of their registry name, and these registries.
OPTIONS = {option.__name__: option.__module__ for option in options.ALL}
MODULES = OPTIONS | {
  "scans": "sparse_transformer.data.scans",
  "released": "sparse_transformer.training.checkpoints.released",
}
REGISTRIES = dict.fromkeys(OPTIONS, "model/options/__init__.py") | {
  "scans": "data/__init__.py",
  "released": "training/checkpoints/foreign.py",
}
ROOMS = (*MODULES, *patterns.CONTENT, "targets")
# What has no use without a room.
SERVES = {"scans": ["Starts"]}
PROGRAM = """
import importlib, pathlib, pkgutil, sys
import sparse_transformer
from helpers import runs
from sparse_transformer.training.loop import train

here = pathlib.Path.cwd()
assert here in pathlib.Path(sparse_transformer.__file__).parents
name = "sparse_transformer"
for module in pkgutil.walk_packages([name], f"{name}."):
  if not module.name.endswith("__main__"):
    importlib.import_module(module.name)

from sparse_transformer import patterns
from sparse_transformer.model import options

modules = {module.rpartition(".")[2] for module in sys.modules}
there = modules | {*patterns.CONTENT} | {x.__name__ for x in options.ALL}
left = there & {*sys.argv}
assert not left, left
train(runs.tiny(**{"train.steps": 2}), here / "run")
"""


def delete(room, folder):
  """Deletes a room from a copy of the package, and its registration."""
  package = folder / "sparse_transformer"
  if room in MODULES:
    module = MODULES[room].replace(".", "/")
    (folder / module).with_suffix(".py").unlink()
    registry = package / REGISTRIES[room]
    lines = registry.read_text().splitlines()
    kept = [line for line in lines if room not in line]
    registry.write_text("\n".join(kept))
  elif room in patterns.CONTENT:
    catalogue = package / "patterns/content_catalogue.py"
    tree = ast.parse(catalogue.read_text())
    tree.body = [x for x in tree.body if getattr(x, "name", "") != room]
    catalogue.write_text(ast.unparse(tree))
  else:
    shutil.rmtree(package / room)


@pytest.mark.parametrize(
  "rooms",
  [
    ROOMS,
    *(soak([room, *SERVES.get(room, ())]) for room in ROOMS),
  ],
  ids=str,
)
def test_the_rest_trains_without_optional_rooms(tmp_path, rooms):
  package = tmp_path / "sparse_transformer"
  shutil.copytree(runs.REPO / package.name, package)
  for room in rooms:
    delete(room, tmp_path)
  folders = runs.REPO, runs.REPO / "tests"
  path = os.pathsep.join(map(str, folders))
  done = runs.python("-c", PROGRAM, *rooms, cwd=tmp_path, PYTHONPATH=path)
  assert done.returncode == 0, done.stderr
  metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
  assert metrics.count('"split": "train"') == 2
