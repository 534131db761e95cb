"""A small sample of English Wikipedia, 1.1 epochs: text on a CPU.

Paper row: none. The pattern is fixed attention in merged heads, as in the
paper's enwik8 network. Blocks have 64 bytes, of which the last 32 are
summaries, 8 for each head.

  python train.py --config=configs/text_small.py --workdir=runs/text_small \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_small

Any text works. Expected on the first 6 MB of an English Wikipedia export: 2.436
bits/byte on the test split, and 2.410 with --min_context=128. On the validation
split: 3.84, 2.87, 2.51 and 2.43 after 500, 2,000, 4,000 and 5,500 steps. The
network has 867,712 parameters. Training takes 19 minutes of CPU time and 16 of
wall-clock time on 2 cores of an AMD EPYC shared with other jobs.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "bytes"
  config.data.length = 256
  config.data.columns = 64

  config.model.num_layers = 4
  config.model.num_heads = 4
  config.model.width = 128
  # Ten times the published values, which are for long runs: this saves the
  # first thousand steps.
  config.model.token_std = 0.1
  config.model.position_std = 0.1

  config.attention.pattern = "fixed"
  config.attention.mode = "merged"
  config.attention.stride = 64
  config.attention.window = 64
  config.attention.width = 8
  config.attention.num_summaries = 4

  config.optimizer.learning_rate = 0.002
  config.optimizer.beta2 = 0.99
  config.optimizer.warmup_steps = 200
  config.optimizer.ema_decay = 0.995

  config.train.steps = 6000
  config.train.batch_size = 4
  config.eval.every = 500
  config.eval.batch_size = 16
  config.eval.sequences = 128
  config.checkpoint.every = 1000
  return config
