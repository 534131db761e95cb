"""CIFAR-10, 59M parameters, dense attention: the paper's baseline.

Paper row: Child et al. 2019, Table 2, 2.82 bits/dim. An iteration takes 0.54 s
on 8 V100s, whereas strided attention takes 0.38 s. The follow-up's preset
c10-dense differs from this config in the same way as cifar10_58m.py differs
from cifar10.py.

  python train.py --config=configs/cifar10_dense.py --workdir=runs/cifar10_dense

In the paper: 2.82 bits/dim after 120 epochs. We have not trained this network.
It has 59,196,928 parameters.
"""

from configs import cifar10


def get_config():
  config = cifar10.get_config()
  config.attention.pattern = "dense"  # paper
  return config
