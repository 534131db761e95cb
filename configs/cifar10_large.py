"""CIFAR-10, minutes on one GPU: cifar10_medium.py, wider and trained longer.

Paper row: none; 6 merged layers of 32 nearby bytes, trained by Muon.

  python train.py --config=configs/cifar10_large.py --workdir=runs/cifar10_large
  python eval.py --workdir=runs/cifar10_large --step=best
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

  config.train.steps = 30_000
  config.train.batch_size = 16
  config.train.log_every = 100
  config.eval.every = 1000
  config.checkpoint.every = 1000
  return config
