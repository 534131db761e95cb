"""Repeated blocks of 256 random symbols: can a key see one period back?

Paper row: none. The symbol to predict also occurred 256 positions before. The
column of the target holds it. The paper's column does not, and neither do
windows of 64 in two layers.

  python train.py --config=configs/repeat.py --workdir=runs/repeat
  python eval.py --workdir=runs/repeat
  python train.py --config=configs/repeat.py --workdir=runs/strided \\
    --config.attention.pattern="Local(64) | Strided(256)"

The optimum is 0.25 bits/symbol, and chance is 4. Expected on the validation
split: 0.253 after 100 steps and 0.251 after 200 steps. The paper's column, and
Local(72), which has the same cost, cannot see the symbol and score 4.000.
Local(256) can see the symbol, but also scores 4.000 after 200 steps. The
network has 119,616 parameters. Training takes 21 seconds of CPU time and 37 of
wall-clock time on 2 cores of an AMD EPYC shared with other jobs, with JAX
0.12.0.1 and Python 3.13.
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
