"""text8: the network of enwik8.py over its 27 letters.

Paper row: none in Child et al. 2019; others reach 1.08 to 1.13 bits/character
with 38M to 277M parameters (Dai et al. 2019, Sukhbaatar et al. 2019).

  python train.py --config=configs/text8.py --workdir=runs/text8 \\
    --config.data.path=text8.zip

Expected: not run yet. 94,715,392 parameters.
"""

from configs import enwik8


def get_config():
  config = enwik8.get_config()
  config.data.name = "text8"
  return config
