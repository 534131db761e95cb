"""Answers a script that is run as a file: how to run it as a module.

Python looks for modules beside such a script first, so it finds this file in
place of the library. That is why the file is named like the library.
"""

import pathlib
import sys

if __name__ == "sparse_transformer":
  # Without this, imports of the library would fail, and not tell why.
  script = pathlib.Path(sys.argv[0])
  sys.exit(
    f"{script.name}: run it as python -m sparse_transformer.{script.stem}, in"
    " the folder above"
  )
