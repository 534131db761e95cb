"""The attention of gpt-oss in a small network, for text on a CPU.

Paper row: none. As in openai/gpt-oss, layers with windows of 128 alternate with
dense layers, 4 query heads share a KV head, each head has a sink, and positions
are rotary. The rest is the network of this repository. Sequences have 1,024
bytes.

  python train.py --config=configs/gpt_oss_small.py --workdir=runs/gpt_oss \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/gpt_oss

The network has 759,968 parameters. Expected on the first 6 MB of an English
Wikipedia export: 2.212 bits/byte on the test split after 8 minutes of CPU time
on one core of an AMD EPYC. On the first 64 validation sequences: 3.77, 2.55 and
2.36 after 100, 500 and 1,000 steps.
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
