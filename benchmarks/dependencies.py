"""What compiled programs depend on, so that stale records are noticed.

A digest stands for the code of some rooms, without comments and docstrings, and
for the values of a config. Where it differs from that of a record, the program
has to be lowered again; where that gives the same program, the record stays.
"""

import ast
import functools
import hashlib
import io
import json
import tokenize

from ml_collections import ConfigDict

from benchmarks import record
from sparse_transformer.targets import compilers

LIBRARY = record.REPO / "sparse_transformer"
# What a training step is made of.
PROGRAM = (
  *("patterns", "attention", "model", "data/images.py", "data/streams.py"),
  *("training/experiment.py", "training/step.py", "training/optimizer.py"),
  *("training/loss_scale.py", "training/distributed/mesh.py"),
)


def of_program(config: ConfigDict) -> str:
  """The digest of what a training step with a config depends on."""
  values = json.dumps(config.to_dict(), sort_keys=True, default=str)
  return _digest(_of_files(PROGRAM), of_compilers(), values)


def of_compilers() -> str:
  """The digest of what turns a lowered program into machine code."""
  devices = sorted((LIBRARY / "targets").glob("*.txtpb"))
  flags, root = compilers.XLA_FLAGS, LIBRARY.parent
  versions = (root / f"requirements-{compiler}.txt" for compiler in flags)
  texts = [path.read_text() for path in (*devices, *versions)]
  return _digest(json.dumps(flags), *texts)


@functools.cache
def _of_files(names: tuple[str, ...]) -> str:
  found = []
  for name in names:
    path = LIBRARY / name
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
      if file.suffix == ".py":
        found += [file.name, without_words(file.read_text())]
  return _digest(*found)


def without_words(text: str) -> str:
  """Python code without comments, docstrings and empty lines.

  >>> without_words('"Why."\\nx = "#"  # how\\n\\ny = 1\\n')
  'x = "#"\\ny = 1'
  """
  lines = text.splitlines()
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      row, column = token.start
      lines[row - 1] = lines[row - 1][:column]
  for node in ast.walk(ast.parse(text)):
    match node:  # a statement that is just a string
      case ast.Expr(value=ast.Constant(value=str())):
        for row in range(node.lineno - 1, node.end_lineno):
          lines[row] = ""
  return "\n".join(line.rstrip() for line in lines if line.strip())


def _digest(*texts: str) -> str:
  return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
