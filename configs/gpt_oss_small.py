"""The attention of gpt-oss in a small network, for text on a CPU.

Paper row: none; windows of 128 and dense attention in turn, 4 query heads for a
key head, a sink in each head and rotary positions, as in openai/gpt-oss, in
sequences of 1,024 bytes. The rest is the network of this repository.

  python train.py --config=configs/gpt_oss_small.py --workdir=runs/gpt_oss \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/gpt_oss

759,968 parameters. Expected, on the first 6 MB of an English Wikipedia export:
2.212 bits/byte on the test split; validation, of the first 64 sequences, 3.77,
2.55, 2.36 after 100, 500, 1,000 steps; 8 minutes of processor time on a core of
an AMD EPYC.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.length = 1024

  config.model.num_heads = 8
  config.model.key_heads = 2
  config.model.sinks = True
  config.model.positions = "rotary"
  config.model.rotary_base = 10_000.0

  config.attention.pattern = "gpt_oss"
  config.attention.mode = "interleaved"

  config.optimizer.name = "muon"
  config.optimizer.learning_rate = 0.01
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.98

  config.train.steps = 1000
  config.train.batch_size = 4
  config.eval.every = 100
  config.eval.batch_size = 8
  config.eval.sequences = 64
  return config
