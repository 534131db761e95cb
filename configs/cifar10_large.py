"""CIFAR-10 in minutes on one GPU: a wider cifar10_medium.py, trained longer.

Paper row: none. In each of 6 merged layers, every head sees 32 nearby bytes.
There is no long-range pattern: through all layers, a prediction can see 619 of
3,072 bytes.

  python train.py --config=configs/cifar10_large.py --workdir=runs/cifar10_large
  python eval.py --workdir=runs/cifar10_large --step=best

The network has 1,671,552 parameters. Expected: 3.199 bits/dim on the test split
and 3.215 on the validation split, after 229 seconds on an NVIDIA H200. On the
first 64 validation images: 3.72, 3.47, 3.41, 3.37, 3.35 and 3.34 bits/dim after
1,000, 5,000, 10,000, 15,000, 20,000 and 25,000 steps.
"""

from configs import cifar10_medium


def get_config():
  config = cifar10_medium.get_config()

  config.model.num_layers = 6
  config.model.num_heads = 6
  config.model.width = 192
  config.model.dtype = "bfloat16"

  config.optimizer.ema_decay = 0.999
  config.optimizer.warmup_steps = 500

  config.train.steps = 25_000
  config.train.batch_size = 16
  config.train.log_every = 100
  config.eval.every = 1000
  config.checkpoint.every = 1000
  return config
