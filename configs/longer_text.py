"""Text at 8,192 bytes of context on a CPU, with a wider and deeper network.

Paper row: none; `long_text.py` with four layers of width 128.

  python -m sparse_transformer.compare --config=configs/longer_text.py \\
    --config.data.path=enwiki-sample.xml.bz2 \\
    --vary=attention.pattern=dense,strided \\
    --budget=processor_seconds:1200 --seeds=3 --workdir=runs/longer_text
  python train.py --config=configs/longer_text.py --workdir=runs/strided \\
    --config.data.path=enwiki-sample.xml.bz2

883,584 parameters. Expected after 1,200 processor seconds of one core of an AMD
EPYC, 3 seeds, in bits/byte of the validation split: strided 2.41, dense 4.00,
as counts of order 1.
"""

from configs import long_text


def get_config():
  config = long_text.get_config()

  config.data.length = 8192

  config.model.num_layers = 4
  config.model.width = 128

  config.train.steps = 1000
  config.eval.every = 50
  config.eval.batch_size = 2
  config.eval.sequences = 8  # 65,536 bytes
  config.checkpoint.every = 500
  return config
