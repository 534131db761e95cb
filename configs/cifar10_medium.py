"""CIFAR-10, half an epoch, on one core of a CPU.

Paper row: none; windows of 16 bytes and of the 16 bytes around the one above
the target, in all heads of 4 merged layers, trained by Muon. No pattern is
long-range: through all layers, a prediction can see 305 bytes of 3,072.

  python train.py --config=configs/cifar10_medium.py \\
    --workdir=runs/cifar10_medium
  python eval.py --workdir=runs/cifar10_medium --step=best

538,368 parameters. Expected: 3.602 bits/dim of the test split, where JPEG XL
has 3.965; validation, of the first 64 images, 4.42, 4.20, 3.97, 3.87, 3.81,
3.76, 3.75 after 500, 1,000, 2,000, 3,000, 4,000, 5,000 and 6,000 steps, and
3.619 on all; 74 to 131 minutes of processor time on one core of an AMD EPYC.
"""

from configs import cifar10_keys


def get_config():
  config = cifar10_keys.get_config()

  config.model.num_layers = 4
  config.model.num_heads = 4
  config.model.width = 128

  config.attention.pattern = "Local(16) | Local(104) - Local(88)"

  config.optimizer.ema_decay = 0.998
  config.optimizer.warmup_steps = 200

  config.train.steps = 6000
  config.train.log_every = 50
  config.eval.every = 500
  config.checkpoint.every = 500
  return config
