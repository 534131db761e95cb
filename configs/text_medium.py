"""A small sample of English Wikipedia, 4.5 epochs: text on a CPU, larger.

Paper row: none; windows of 128 bytes in each of 6 layers, so that a prediction
can see 763 bytes before it, in sequences of 1,024 bytes, trained by Muon.

  python train.py --config=configs/text_medium.py --workdir=runs/text_medium \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_medium --step=best --min_context=0,512

3,763,424 parameters, 2.7 times the bytes of its training text. Expected: 1.838
bits/byte of the test split, 1.821 with at least 512 bytes before each;
validation 2.413, 2.021, 1.908, 1.845, 1.820, 1.819, 1.822 after 1,000, 3,000,
5,000, 7,000, 9,000, 10,000 and 12,000 steps: at the end it overfits.
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
