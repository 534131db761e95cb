"""CIFAR-10, 2M parameters, strided attention: the follow-up's smallest.

Paper row: none in Child et al. 2019. This is preset c10_2m of the follow-up's
released code (Jun et al. 2020).

  python train.py --config=configs/cifar10_2m.py --workdir=runs/cifar10_2m
  python eval.py --workdir=runs/cifar10_2m --step=best

Expected: not known, because we have not trained this network. It has 2,436,480
parameters. The learning rate decays over 10,000 epochs, as in cifar10_15m.py.
"""

from configs import cifar10_10m


def get_config():
  config = cifar10_10m.get_config()
  config.model.num_heads = 8  # follow-up
  config.model.width = 64  # follow-up
  return config
