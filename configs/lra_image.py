"""Gray CIFAR-10 by its 1,024 pixels: Image of Long Range Arena, on a CPU.

Paper row: none. One layer of width 128 with 8 heads, as Image's Transformer in
arXiv 2011.04006. What differs: queries and keys have width 128, theirs 64, and
the MLP 512, theirs 128 (`model.half_size` halves both, to 64 and 256);
embeddings of rows and columns in place of sinusoids; the label is a linear
function of the pool, without another MLP; a tenth of the steps.

  python train.py --config=configs/lra_image.py --workdir=runs/lra_image
  python eval.py --workdir=runs/lra_image
  python train.py --config=configs/lra_image.py --workdir=runs/bigbird \\
    --config.attention.pattern="BigBird(32, causal=False)"

Other bidirectional patterns: "Longformer(65, causal=False)",
"Local(64, causal=False) | Strided(32, causal=False)", fixed.

Expected: not run yet; before training 3.32 bits/label, accuracy 0.1. 158,464
parameters.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "cifar10_gray"

  config.model.task = "classify"
  config.model.pool = "first"
  config.model.num_layers = 1
  config.model.num_heads = 8
  config.model.width = 128
  config.model.half_size = True
  config.model.token_std = 0.1
  config.model.position_std = 0.1
  config.model.remat = "none"

  config.attention.pattern = "dense"
  config.attention.stride = 32  # a row, for strided and fixed
  config.attention.window = 32
  config.attention.width = 4

  config.optimizer.learning_rate = 0.001
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.99

  config.train.steps = 300
  config.train.batch_size = 16
  config.eval.every = 100
  config.eval.batch_size = 50
  config.eval.sequences = 500
  config.checkpoint.every = 100
  return config
