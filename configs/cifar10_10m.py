"""CIFAR-10, 10M parameters, strided attention: a narrow cifar10_150m.py.

Paper row: none in Child et al. 2019. This is preset c10_10m of the follow-up's
released code (Jun et al. 2020).

  python train.py --config=configs/cifar10_10m.py --workdir=runs/cifar10_10m
  python eval.py --workdir=runs/cifar10_10m --step=best

Expected: not known, because we have not trained this network. It has 9,591,552
parameters. The learning rate decays over 10,000 epochs, as in cifar10_15m.py.
"""

from configs import cifar10_150m


def get_config():
  config = cifar10_150m.get_config()
  config.model.width = 128  # follow-up
  config.train.batch_size = 16  # guess: the follow-up's 16 per GPU, on one GPU
  return config
