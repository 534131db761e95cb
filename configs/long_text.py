"""Text at 4,096 bytes of context on a CPU: patterns at equal time.

Paper row: none; two layers in which every head uses the union of both factors.
Made for a comparison:

  python -m sparse_transformer.compare --config=configs/long_text.py \\
    --config.data.path=enwiki-sample.xml.bz2 \\
    --vary="attention.pattern=dense;dense with data.length=512 \\
train.batch_size=8 eval.sequences=128;local;strided" \\
    --tune=optimizer.learning_rate=0.005,0.01,0.02 \\
    --tune_budget=processor_seconds:75 --budget=processor_seconds:300 \\
    --seeds=3 --workdir=runs/long_text
  python train.py --config=configs/long_text.py --workdir=runs/strided \\
    --config.data.path=enwiki-sample.xml.bz2

141,120 parameters. Expected after 300 processor seconds of one core of an AMD
EPYC, 3 seeds, in bits/byte of the validation split: local 2.36, strided 2.41,
dense 3.83, which is still close to counts of order 1, 4.00, and dense with 512
bytes of context 2.38 (docs/evidence.md).
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.length = 4096

  config.model.num_layers = 2
  config.model.width = 64

  config.attention.pattern = "strided"
  config.attention.num_summaries = 1

  config.optimizer.name = "muon"
  config.optimizer.learning_rate = 0.01
  config.optimizer.warmup_steps = 50
  config.optimizer.ema_decay = 0.98

  config.train.steps = 3000
  config.train.batch_size = 1
  config.eval.every = 100
  config.eval.batch_size = 4
  config.eval.sequences = 16  # 65,536 bytes
  config.checkpoint.every = 1000
  return config
