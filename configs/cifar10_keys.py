"""CIFAR-10 with about 36 keys per query: what a pattern makes of them.

Paper row: none; 2 merged layers of the small network on CPUs, trained by Muon,
with a short window and the column of the target.

  python -m sparse_transformer.compare --config=configs/cifar10_keys.py \\
    --vary="attention.pattern=Local(36);Local(16) | Strided(96);Local(16) | \\
Strided(96, 1);Neighborhood(3, 5, 32)" \\
    --tune=optimizer.learning_rate=0.01,0.02,0.04,0.08 --budget=steps:400 \\
    --seeds=3 --workdir=runs/cifar10_keys

What each scores: docs/evidence.md.
"""

from configs import cifar10_small


def get_config():
  config = cifar10_small.get_config()

  config.model.num_layers = 2

  config.attention.pattern = "Local(16) | Strided(96, 1)"
  config.attention.mode = "merged"
  config.attention.cycle = ()

  config.optimizer.name = "muon"
  config.optimizer.learning_rate = 0.02

  config.train.steps = 400
  config.eval.sequences = 64
  config.checkpoint.every = 400
  return config
