"""Tells users who run a script as a file how to run it as a module.

When a script in this folder is run as a file, Python searches this folder
first, so `import sparse_transformer` finds this file instead of the library.
That is why the file has the name of the library.
"""

import pathlib
import sys

if __name__ == "sparse_transformer":
  # Without this message, imports of the library would fail with no explanation.
  script = pathlib.Path(sys.argv[0])
  sys.exit(
    f"{script.name}: run it as python -m sparse_transformer.{script.stem}, in"
    " the folder above"
  )
