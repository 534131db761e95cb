"""Associative recall of 4 pairs, after 48 blanks.

Paper row: none. A sequence contains 4 pairs of a key and a value, 48 blanks,
and each key again, followed by its value. The first layer can combine a key
with its value. The second layer has to find the right pair among all earlier
positions. The config was made for this comparison:

  python -m sparse_transformer.compare --config=configs/recall.py \\
    --vary="attention.pattern=Local(2), Causal();Local(2), Local(16);\\
Local(2), TopBlocks(4, 4);Local(2), Routing(4, 16);Local(2), LSH(8, 8, 2)" \\
    --tune=optimizer.learning_rate=0.01,0.02 --budget=steps:600 --seeds=3 \\
    --workdir=runs/recall
  python train.py --config=configs/recall.py --workdir=runs/top

The optimum is 0.2683 bits/symbol. A network that cannot see the pairs needs 2
bits more for each of the 4 answers, and scores 0.3933 at best. Expected on the
validation split after 600 steps, as the mean of 3 seeds: TopBlocks 0.284,
Routing 0.299, LSH 0.308 (0.269, 0.269 and 0.386 by seed), dense 0.342, and
Local 0.394, which cannot see the pairs. The network has 102,592 parameters.
"""

from configs import repeat


def get_config():
  config = repeat.get_config()

  config.data.name = "recall"
  config.data.length = 64
  config.data.columns = 16
  config.data.pairs = 4

  config.model.token_std = 0.5  # with 0.1, not learned in 1,000 steps

  config.attention.pattern = "Local(2), TopBlocks(4, 4)"
  config.attention.mode = "interleaved"

  config.optimizer.warmup_steps = 50

  config.train.steps = 600
  config.train.batch_size = 64
  config.eval.batch_size = 64
  config.eval.sequences = 256
  return config
