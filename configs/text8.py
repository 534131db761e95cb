"""text8: the network of enwik8.py on text of 27 characters.

Paper row: none in Child et al. 2019. Other networks reach 1.08 to 1.13
bits/character with 38M to 277M parameters (Dai et al. 2019, Sukhbaatar et al.
2019).

  python train.py --config=configs/text8.py --workdir=runs/text8 \\
    --config.data.path=text8.zip

Expected: not known, because we have not run this config. The network has
94,715,392 parameters.
"""

from configs import enwik8


def get_config():
  config = enwik8.get_config()
  config.data.name = "text8"
  return config
