"""Lists the commands.

python -m sparse_transformer
"""

import ast
import re

from sparse_transformer import tables, version

MODULES = "sample", "explain", "compare", "report", "export", "data/__main__"


def main() -> None:
  rows = []
  inside = (f"sparse_transformer/{name}.py" for name in MODULES)
  for name in ("train.py", "eval.py", *inside):
    if (path := version.ROOT / name).exists():  # the first two only in a clone
      about = ast.get_docstring(ast.parse(path.read_text())) or ""
      command = re.findall(r"^python (?:-m )?\S+", about, re.MULTILINE)[0]
      rows.append((command, about.splitlines()[0]))
  print(tables.align(rows))
  print("Each lists its flags with --help.")


if __name__ == "__main__":
  main()
