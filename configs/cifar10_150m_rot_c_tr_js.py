"""CIFAR-10, 152M parameters, images in 1,152 orders.

Paper row: none in Child et al. 2019; preset c10-150m-rot-c-tr-js of Jun et al.
2020, who released its weights as c10-150m-rot-tr-c-js-dist-aug.npz.

  python train.py --config=configs/cifar10_150m_rot_c_tr_js.py --workdir=runs/js
  python eval.py --workdir=runs/js --step=best

Expected: not read off Figure 3a. The abstract has 2.56 bits/dim for 150M
parameters, without saying in which orders. Not run here yet; 151,630,336
parameters.
"""

from configs import cifar10_150m


def get_config():
  config = cifar10_150m.get_config()

  config.data.orders = ("rotation", "colors", "transposition", "jigsaw")
  return config
