"""CIFAR-10, half an epoch on one core of a CPU.

Paper row: none. In each of 4 merged layers, every head sees a window of 16
bytes and the 16 bytes around the byte above the target. There is no long-range
pattern: through all layers, a prediction can see 305 of 3,072 bytes. The
network is trained with Muon.

  python train.py --config=configs/cifar10_medium.py \\
    --workdir=runs/cifar10_medium
  python eval.py --workdir=runs/cifar10_medium --step=best

The network has 538,368 parameters. Expected: 3.602 bits/dim on the test split,
where JPEG XL needs 3.965, and 3.619 on the validation split, after 74 to 131
minutes of CPU time on one core of an AMD EPYC. On the first 64 validation
images: 4.42, 4.20, 3.97, 3.87, 3.81, 3.76 and 3.75 bits/dim after 500, 1,000,
2,000, 3,000, 4,000, 5,000 and 6,000 steps.
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
