"""CIFAR-10, 15M parameters, strided attention: for one GPU.

Paper row: none in Child et al. 2019; the 59M model with 32 layers, preset
c10_15m of the follow-up's released code (Jun et al. 2020).

  python train.py --config=configs/cifar10_15m.py --workdir=runs/cifar10_15m

Expected: not published. Not run here yet; 14,910,976 parameters.
"""

from configs import cifar10


def get_config():
  config = cifar10.get_config()

  config.model.num_layers = 32
  config.model.dropout = 0.005

  config.optimizer.warmup_steps = 15_000
  config.train.steps = 300_000  # 100 epochs; the preset runs until stopped
  return config
