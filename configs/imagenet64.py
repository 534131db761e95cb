"""ImageNet 64 x 64, 152M parameters, strided attention.

Paper row: Child et al. 2019, Table 1, 3.44 bits/dim (3.437, one run) on the
validation set of van den Oord's downsampled ImageNet, after 7 days on 64 V100s.
The paper states neither the learning rate nor the batch size. Here, that
validation set is the test split, and 50,000 training images are the validation
split, as in the released code of the follow-up (Jun et al. 2020).

  python train.py --config=configs/imagenet64.py --workdir=runs/imagenet64 \\
    --config.data.path=FOLDER
  python eval.py --workdir=runs/imagenet64 --step=best

In the paper: 3.44 bits/dim after 70 epochs. We have not trained this network.
It has 151,645,184 parameters. The folder must contain train_64x64.npy and
valid_64x64.npy, which are arrays of uint8 images.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "imagenet64"  # paper

  config.model.num_layers = 48  # paper
  config.model.num_heads = 16  # paper
  config.model.width = 512  # paper
  config.model.dropout = 0.01  # paper
  config.model.token_std = 0.01  # follow-up
  config.model.position_std = 0.01  # follow-up
  config.model.dtype = "bfloat16"  # ours: float16 in the paper

  config.attention.pattern = "strided"  # paper
  config.attention.cycle = (0, 1, 0, 0)  # follow-up: 1 of columns, 3 local
  config.attention.stride = 128  # paper; a row of the image is 192 bytes
  config.attention.window = 128  # follow-up

  config.optimizer.learning_rate = 0.00015  # follow-up
  config.optimizer.warmup_steps = 5000  # paper
  config.optimizer.weight_decay = 0.01  # paper

  config.train.steps = 70 * 1_231_149 // 128  # paper: 70 epochs
  config.train.batch_size = 128  # follow-up: 4 per GPU, on 32 GPUs
  config.eval.every = 1_231_149 // 128  # follow-up: each epoch
  config.eval.sequences = 0  # follow-up
  config.checkpoint.every = config.eval.every  # ours: any may be the best
  return config
