"""CIFAR-10, 15M parameters, each image in one of four rotations.

Paper row: none in Child et al. 2019. This is preset c10_15m_rot of Jun et al.
2020, who released its weights as c10-15m-rot-dist-aug.npz.

  python train.py --config=configs/cifar10_15m_rot.py --workdir=runs/rot
  python eval.py --workdir=runs/rot --step=best
  python -m sparse_transformer.sample --workdir=runs/rot --order=rotation=1

Expected: not known. Figure 3a of Jun et al. 2020 may show the result, but we
have not read off values. We have not trained this network. It has 14,911,744
parameters.
"""

from configs import cifar10_15m


def get_config():
  config = cifar10_15m.get_config()

  config.data.orders = ("rotation",)
  return config
