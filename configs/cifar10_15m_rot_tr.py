"""CIFAR-10, 15M parameters, each image rotated and optionally transposed.

Paper row: none in Child et al. 2019. This is preset c10_15m_rot_tr of Jun et
al. 2020, who released its weights as c10-15m-rot-tr-dist-aug.npz.

  python train.py --config=configs/cifar10_15m_rot_tr.py --workdir=runs/rot_tr
  python eval.py --workdir=runs/rot_tr --step=best

Expected: not known. Figure 3a of Jun et al. 2020 may show the result, but we
have not read off values. We have not trained this network. It has 14,912,256
parameters.
"""

from configs import cifar10_15m


def get_config():
  config = cifar10_15m.get_config()

  config.data.orders = ("rotation", "transposition")
  return config
