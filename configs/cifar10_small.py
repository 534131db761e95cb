"""CIFAR-10 on a CPU: a small version of the paper's strided network.

Paper row: none; half-size layers, stride and window as in the 59M model, with
alternating layers of columns and of rows.

  python train.py --config=configs/cifar10_small.py --workdir=runs/cifar10_small

Expected after 300 steps of 4 images: 6.39 bits/dim on the test split; training
7.7, 7.2, 7.0, 6.7, 6.5, 6.2 as means over 50 steps. These 0.025 epochs only
show that the loss falls. 154,496 parameters, 2 minutes on 2 cores of an AMD
EPYC, plus 3 minutes for the evaluation.
"""

from configs import cifar10


def get_config():
  config = cifar10.get_config()

  config.model.num_layers = 4
  config.model.width = 64
  config.model.dropout = 0.0
  config.model.token_std = 0.1
  config.model.position_std = 0.1
  config.model.dtype = "float32"

  config.attention.cycle = (1, 0)

  config.optimizer.learning_rate = 0.003
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.99

  config.train.steps = 300
  config.train.batch_size = 4
  config.train.log_every = 10
  config.eval.every = 100
  config.eval.batch_size = 8
  config.eval.sequences = 32
  config.checkpoint.every = 100
  return config
