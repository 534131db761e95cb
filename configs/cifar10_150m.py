"""CIFAR-10, 152M parameters, strided attention: the follow-up's largest.

Paper row: none in Child et al. 2019. This is preset c10_150m of the follow-up's
released code (Jun et al. 2020). The follow-up reaches 2.56 bits/dim with this
network by augmenting the data, in 1,000 to 1,500 epochs. This config does not
augment the data.

  python train.py --config=configs/cifar10_150m.py --workdir=runs/cifar10_150m
  python eval.py --workdir=runs/cifar10_150m --step=best

Expected: Figure 3a of the follow-up shows the result on validation images, from
which we have not read off values. We have not trained this network. It has
151,612,416 parameters. The learning rate decays over 10,000 epochs, as in
cifar10_15m.py.
"""

from configs import cifar10_15m


def get_config():
  config = cifar10_15m.get_config()

  config.model.num_layers = 48  # follow-up
  config.model.num_heads = 16  # follow-up
  config.model.width = 512  # follow-up
  config.model.half_size = False  # follow-up

  config.attention.cycle = (0, 1, 0, 0)  # follow-up

  config.optimizer.learning_rate = 0.00015  # follow-up
  config.train.batch_size = 16  # guess: the follow-up's 2 per GPU, on 8 GPUs
  return config
