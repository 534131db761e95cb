"""CIFAR-10, 59M parameters, strided attention: the paper's best.

Paper row: Child et al. 2019, Table 1 and Table 2, 2.80 bits/dim on the test
split, 0.38 s per iteration on 8 V100s. Stride, ratio of strided to local layers
and batch size: the released code of the follow-up (Jun et al. 2020), c10-58m.

  python train.py --config=configs/cifar10.py --workdir=runs/cifar10

Expected: 2.80 bits/dim after 120 epochs. Not run here yet; 59,196,928
parameters. About 8e18 floating-point operations without attention, or 8
hours at a sustained 300 TFLOP/s.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "cifar10"

  config.model.num_layers = 128
  config.model.num_heads = 2
  config.model.width = 256
  config.model.half_size = True
  config.model.dropout = 0.25
  config.model.token_std = 0.01
  config.model.position_std = 0.01
  config.model.dtype = "bfloat16"

  config.attention.pattern = "strided"
  config.attention.cycle = (1, 0, 0, 0)  # one layer of columns, three local
  config.attention.stride = 96  # a row of bytes: 32 pixels of 3 channels
  config.attention.window = 96

  config.optimizer.learning_rate = 0.00035
  config.optimizer.warmup_steps = 5000

  config.train.steps = 360_000  # 120 epochs of 48,000 images
  config.train.batch_size = 16
  config.train.accumulation = 1
  return config
