"""ImageNet 64 x 64, 152M parameters, strided attention.

Paper row: Child et al. 2019, Table 1, 3.44 bits/dim on the validation set of
van den Oord's downsampled ImageNet, 7 days on 64 V100s. Learning rate, weight
decay, stride, ratio of layers and batch size: the released code of the
follow-up (Jun et al. 2020), i64_150m, on 32 GPUs.

  python train.py --config=configs/imagenet64.py --workdir=runs/imagenet64

Expected: 3.44 bits/dim after 70 epochs. Not run here yet; 151,645,184
parameters. tensorflow-datasets prepares the data where TensorFlow is
installed: downsampled_imagenet/64x64, file_format="array_record".
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "imagenet64"

  config.model.num_layers = 48
  config.model.num_heads = 16
  config.model.width = 512
  config.model.dropout = 0.01
  config.model.token_std = 0.01
  config.model.position_std = 0.01
  config.model.dtype = "bfloat16"

  config.attention.pattern = "strided"
  config.attention.cycle = (0, 1, 0, 0)
  config.attention.stride = 128  # as published; a row is 192 bytes
  config.attention.window = 128

  config.optimizer.learning_rate = 0.00015
  config.optimizer.warmup_steps = 15_000
  config.optimizer.weight_decay = 0.001

  config.train.steps = 673_000  # 70 epochs of 1,231,149 images
  config.train.batch_size = 128
  return config
