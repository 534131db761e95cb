"""A small sample of English Wikipedia, 3.7 epochs: text on a CPU, larger.

Paper row: none; strided attention in which every head uses both factors, at a
context of 1,024 bytes, trained by Muon.

  python train.py --config=configs/text_medium.py --workdir=runs/text_medium \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_medium --step=best --min_context=512

Expected: 1.89 bits/byte of the test split with at least 512 bytes before each,
1.91 without, after 6,858 processor seconds of an AMD EPYC. 1,332,320
parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.length = 1024

  config.model.num_heads = 5
  config.model.width = 160

  config.attention.pattern = "strided"
  config.attention.window = 128
  config.attention.num_summaries = 1

  config.optimizer.name = "muon"
  config.optimizer.learning_rate = 0.01
  config.optimizer.ema_decay = 0.998

  config.train.steps = 20_000
  config.train.batch_size = 1
  config.eval.every = 1000
  config.eval.batch_size = 8
  config.eval.sequences = 0
  config.checkpoint.every = 1000
  return config
