"""Measures the gain from keys that follow the last match, on text with copies.

  python train.py --config=benchmarks/match_config.py --workdir=runs/match \\
    --config.data.path=FOLDER

`benchmarks.corpora` writes FOLDER. Of four heads, three have a window of 128,
and one sees only the key that holds the byte after the last match. To compare,
override attention.pattern with one of:

  (Local(128), Local(128), Local(128), RandomBlocks(1, 1)),: a random past key.
  Local(128): windows alone.
  (Local(128), Local(128), Local(128), LastMatch(1, most=128)),: near matches.
"""

from benchmarks import matches
from configs import default
from sparse_transformer import patterns

# Register it here rather than with the class, because tests run for all
# registered classes.
patterns.register(matches.LastMatch)


def get_config():
  config = default.get_config()

  config.data.name = "bytes"
  config.data.splits = "names"
  config.data.length = 1024

  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.width = 64
  config.model.positions = "rotary"
  config.model.token_std = 0.1
  config.model.remat = "none"

  window = "Local(128)"
  match = matches.LastMatch(1)
  config.attention.pattern = f"({window}, {window}, {window}, {match}),"

  config.optimizer.learning_rate = 0.003
  config.optimizer.beta2 = 0.99
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.99

  config.train.steps = 500
  config.train.batch_size = 4
  config.eval.every = 500
  config.eval.batch_size = 16
  return config
