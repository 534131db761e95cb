"""Music in sequences of 65,536 samples, 152M parameters, strided attention.

Paper row: Child et al. 2019, Table 4, 1.97 bits/sample on classical music at 12
kHz in 8-bit mu-law. The paper states the length and the number of parameters,
and that a larger network does not fit a V100 with 16 GB. The sizes here are
guesses that result in this number of parameters. It is not known how the paper
processed and split its data, so scores on other music cannot be compared with
the paper's score.

  python train.py --config=configs/music_152m.py --workdir=runs/music_152m \\
    --config.data.path=FOLDER
  python eval.py --workdir=runs/music_152m --step=best

In the paper: 1.97 bits/sample on the paper's data. We have not trained this
network. It has 151,840,256 parameters.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "audio"  # paper
  config.data.length = 65_536  # paper
  config.data.columns = 256  # paper: the stride, section 5.3
  config.data.rate = 12_000  # paper
  config.data.fractions = (0.9, 0.05, 0.05)  # guess

  config.model.num_layers = 48  # guess: as in imagenet64.py
  config.model.num_heads = 16  # guess: as in imagenet64.py
  config.model.width = 512  # guess: as in imagenet64.py
  config.model.dropout = 0.01  # guess: as in imagenet64.py
  config.model.dtype = "bfloat16"  # ours: float16 in the paper

  config.attention.pattern = "strided"  # paper
  config.attention.cycle = (0, 1, 0, 0)  # guess: as in imagenet64.py
  config.attention.stride = 256  # guess: the square root of the length
  config.attention.window = 256  # guess: the stride

  config.optimizer.learning_rate = 0.00015  # guess: as in imagenet64.py
  config.optimizer.warmup_steps = 5000  # paper
  config.optimizer.weight_decay = 0.01  # paper

  config.train.steps = 100_000  # guess
  config.train.batch_size = 8  # guess: 1 per GPU
  config.eval.batch_size = 8  # ours
  config.eval.sequences = 0  # guess
  return config
