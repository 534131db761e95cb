"""Blocks of 256 random symbols, repeated: keys one period back, or chance.

Paper row: none. The symbol to predict is 256 positions back: the column of the
target holds it; the paper's column and two windows of 64 do not.

  python train.py --config=configs/repeat.py --workdir=runs/repeat
  python eval.py --workdir=runs/repeat
  python train.py --config=configs/repeat.py --workdir=runs/strided \\
    --config.attention.pattern="Local(64) | Strided(256)"

The optimum is 0.25 bits/symbol, chance 4. Expected after 200 steps, on the
validation split: 0.251, and 4.000 with the paper's column or with Local(72), of
equal cost, which cannot see the symbol; also 4.000 with Local(256), which can.
0.253 after 100 steps. 119,616 parameters, 21 seconds of CPU time
and 37 of wall-clock time on 2 cores of an AMD EPYC shared with other jobs, with
JAX 0.12.0.1 and Python 3.13.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.name = "repeat"
  config.data.length = 4096
  config.data.columns = 256
  config.data.symbols = 16
  config.data.period = 256

  config.model.num_layers = 2
  config.model.width = 64

  config.attention.pattern = "Local(64) | Strided(256, offset=1)"
  config.attention.num_summaries = 1

  config.optimizer.name = "muon"
  config.optimizer.learning_rate = 0.01
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.98

  config.train.steps = 200
  config.train.batch_size = 1
  config.eval.every = 100
  config.eval.batch_size = 16
  config.eval.sequences = 16
  config.checkpoint.every = 1000
  return config
