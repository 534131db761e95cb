"""Lists the commands.

python -m sparse_transformer
"""

import ast

from sparse_transformer import tables, version

COMMANDS = {
  "python train.py": "train.py",
  "python eval.py": "eval.py",
  **{
    f"python -m sparse_transformer.{name}": f"sparse_transformer/{name}.py"
    for name in ("sample", "explain", "compare", "report", "export")
  },
  "python -m sparse_transformer.data": "sparse_transformer/data/__main__.py",
}


def main() -> None:
  rows = []
  for command, name in COMMANDS.items():
    if (path := version.ROOT / name).exists():  # the first two only in a clone
      about = ast.get_docstring(ast.parse(path.read_text())) or ""
      rows.append((command, about.splitlines()[0]))
  print(tables.align(rows))
  print("Each lists its flags with --help.")


if __name__ == "__main__":
  main()
