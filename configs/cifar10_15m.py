"""CIFAR-10, 15M parameters, strided attention: for one GPU.

Paper row: none in Child et al. 2019. This is the 59M network with 32 layers,
preset c10_15m of the follow-up's released code (Jun et al. 2020).

  python train.py --config=configs/cifar10_15m.py --workdir=runs/cifar10_15m
  python eval.py --workdir=runs/cifar10_15m --step=best

Expected: Figure 3a of the follow-up shows the result on validation images, from
which we have not read off values. We have not trained this network. It has
14,910,976 parameters. The learning rate decays over 10,000 epochs, which is far
more than the network needs. As in the follow-up, stop the run when its score on
the validation split no longer improves.
"""

from configs import cifar10


def get_config():
  config = cifar10.get_config()

  config.model.num_layers = 32  # follow-up
  config.model.dropout = 0.005  # follow-up

  config.optimizer.warmup_steps = 15_000  # follow-up
  config.train.steps = 10_000 * 48_000 // 16  # follow-up: 10,000 epochs
  config.train.batch_size = 16  # follow-up: on one GPU
  return config
