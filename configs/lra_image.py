"""Gray CIFAR-10 by its 1,024 pixels: Image of Long Range Arena.

Paper row: none; arXiv 2011.04006, with the sizes of its code for Sparse
Transformer, which are not those of its paper: one layer of width 128 with 8
heads, queries and keys of width 64 together, 200 epochs of batches of 256, a
learning rate of 0.0005. What differs: the MLP is 256 wide, not 128; embeddings
of rows and columns; the label is a linear function of the mean over positions,
not of a start's output and without a second MLP; LRA holds out 5,000 images for
validation, here 2,000.

  python train.py --config=configs/lra_image.py --workdir=runs/lra_image
  python eval.py --workdir=runs/lra_image

To compare patterns, use more layers (docs/train.md has the benchmark's).

Expected: not run with these settings. 158,464 parameters; 3.32 bits/label and
an accuracy of 0.1 before training. Published: 42.44 % for dense attention,
44.24 % for a Sparse Transformer.
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
