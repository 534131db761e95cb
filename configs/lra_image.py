"""Gray CIFAR-10 images as 1,024 pixels: the task Image of Long Range Arena.

Paper row: none. The task is from arXiv 2011.04006. The sizes are those of its
code for Sparse Transformer, which differ from those in its paper: one layer of
width 128 with 8 heads, queries and keys that are 64 wide over all heads, 200
epochs with batches of 256, and a learning rate of 0.0005.

This network differs from the benchmark's in the following ways. The MLP is 256
wide, not 128. Positions are embedded by row and column. The label is predicted
by a linear layer from the mean over positions, whereas the benchmark uses the
output at a start token and a second MLP. The validation split has 2,000 images,
not 5,000.

  python train.py --config=configs/lra_image.py --workdir=runs/lra_image
  python eval.py --workdir=runs/lra_image

To compare patterns, use more layers (docs/train.md lists the benchmark's
patterns).

Expected: not known, because we have not run these settings. The network has
158,464 parameters. Before training, it scores 3.32 bits/label with an accuracy
of 0.1. Published accuracies: 42.44 % for dense attention, and 44.24 % for a
Sparse Transformer.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "cifar10_gray"

  config.model.task = "classify"
  config.model.num_layers = 1
  config.model.num_heads = 8
  config.model.width = 128
  config.model.half_size = True
  config.model.dropout = 0.3
  config.model.token_std = 0.1
  config.model.position_std = 0.1

  config.attention.pattern = "fixed"
  config.attention.mode = "merged"
  config.attention.stride = 32  # a row of the image
  config.attention.window = 32
  config.attention.width = 4

  config.optimizer.learning_rate = 0.0005
  config.optimizer.weight_decay = 0.0
  config.optimizer.warmup_steps = 175
  config.optimizer.ema_decay = 0.99

  config.train.steps = 35_000
  config.train.batch_size = 256
  config.eval.every = 1000
  config.eval.batch_size = 100
  config.eval.sequences = 0
  config.checkpoint.every = 1000
  return config
