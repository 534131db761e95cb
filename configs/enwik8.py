"""enwik8, 95M parameters, fixed attention in merged heads.

Paper row: Child et al. 2019, Tables 1 to 3, 0.99 bits/byte on the test split
(0.9952 at a minimum context of 6,144, 0.9908 at 12,160), 0.55 s per iteration
on 8 V100s. The paper states neither learning rate nor batch size: those here
are guesses from its other runs.

  python -m sparse_transformer.data prepare enwik8
  python train.py --config=configs/enwik8.py --workdir=runs/enwik8
  python eval.py --workdir=runs/enwik8 --min_context=6144

Expected: 0.99 bits/byte after 80 epochs. Not run here yet; 94,949,888
parameters. About 5e18 floating-point operations without attention, or 5
hours at a sustained 300 TFLOP/s.
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "enwik8"
  config.data.length = 12_288
  config.data.columns = 128  # the stride, section 5.3

  config.model.num_layers = 30
  config.model.num_heads = 8
  config.model.width = 512
  config.model.dropout = 0.4
  config.model.dtype = "bfloat16"

  config.attention.pattern = "fixed"
  config.attention.mode = "merged"
  config.attention.stride = 128
  config.attention.window = 128  # for pattern=local and strided
  config.attention.width = 32
  config.attention.num_summaries = 4  # 8 heads share 4 sub-blocks

  config.optimizer.learning_rate = 0.00035
  config.optimizer.warmup_steps = 5000

  config.train.steps = 36_600  # 80 epochs of 90M bytes
  config.train.batch_size = 16
  config.eval.sequences = 64
  config.eval.batch_size = 8
  return config
