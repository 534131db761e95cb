"""Is imported in place of the library where a file of it is run as a script.

Python then looks for modules beside that file.
"""

import pathlib
import sys

if __name__ == "sparse_transformer":
  script = pathlib.Path(sys.argv[0])
  sys.exit(
    f"{script.name}: run it as python -m sparse_transformer.{script.stem}, in"
    " the folder above"
  )
