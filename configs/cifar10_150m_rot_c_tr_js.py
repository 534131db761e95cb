"""CIFAR-10, 152M parameters, images in 1,152 orders.

Paper row: none in Child et al. 2019. This is preset c10-150m-rot-c-tr-js of Jun
et al. 2020, who released its weights as c10-150m-rot-tr-c-js-dist-aug.npz.

  python train.py --config=configs/cifar10_150m_rot_c_tr_js.py --workdir=runs/js
  python eval.py --workdir=runs/js --step=best

Expected: we have not read off values from Figure 3a of Jun et al. 2020. Their
abstract states 2.56 bits/dim for 150M parameters, without saying for which
orders. We have not trained this network. It has 151,630,336 parameters.
"""

from configs import cifar10_150m


def get_config():
  config = cifar10_150m.get_config()

  config.data.orders = ("rotation", "colors", "transposition", "jigsaw")
  return config
