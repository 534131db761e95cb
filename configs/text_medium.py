"""A small sample of English Wikipedia, 4.5 epochs: a larger network for CPUs.

Paper row: none. Each of 6 layers uses a window of 128 bytes, so a prediction
can see the 763 bytes before it. Sequences have 1,024 bytes. The network is
trained with Muon.

  python train.py --config=configs/text_medium.py --workdir=runs/text_medium \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_medium --step=best --min_context=0,512

The network has 3,763,424 parameters. Expected: 1.838 bits/byte on the test
split, and 1.821 with a minimum context of 512 bytes. On the validation split:
2.413, 2.021, 1.908, 1.845, 1.820, 1.819 and 1.822 after 1,000, 3,000, 5,000,
7,000, 9,000, 10,000 and 12,000 steps. The network overfits at the end.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.length = 1024

  config.model.num_layers = 6
  config.model.num_heads = 4
  config.model.width = 224

  config.attention.pattern = "local"
  config.attention.window = 128

  config.optimizer.name = "muon"
  config.optimizer.learning_rate = 0.01
  config.optimizer.ema_decay = 0.998

  config.train.steps = 12_000
  config.train.batch_size = 2
  config.eval.every = 1000
  config.eval.batch_size = 8
  config.eval.sequences = 0
  config.checkpoint.every = 1000
  return config
