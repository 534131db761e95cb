"""Source code of Python's standard library: text that needs no download.

Paper row: none. This is the network of text_small.py.

  python train.py --config=configs/stdlib.py --workdir=runs/stdlib

Expected: not known, because we have not run this config. The network has
867,712 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.data.name = "stdlib"
  return config
