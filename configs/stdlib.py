"""Python source of the interpreter's standard library: text without a file.

Paper row: none; the network of text_small.py.

  python train.py --config=configs/stdlib.py --workdir=runs/stdlib

Expected: not run yet. 867,712 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.data.name = "stdlib"
  return config
