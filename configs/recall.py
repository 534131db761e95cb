"""Associative recall: 8 pairs, 224 blanks, and every key again for its value.

Paper row: none. The first layer puts keys and values together. The second sees
the pairs through 17 global keys, of which the first holds no symbol.

  python train.py --config=configs/recall.py --workdir=runs/recall
  python eval.py --workdir=runs/recall

The optimum is 0.2133 bits/symbol; without keys among the pairs, each of the 8
answers costs 3 bits more, 0.0938 in all. Expected: 0.243 on the test split, of
which 0.0001 is for the answers; the rest above the optimum is for the order of
the queries, which a window of 2 does not see. Validation 0.336, 0.322, 0.244,
0.243 after 400, 500, 600, 800 steps. With Local(16) in its place, 0.308:
answers stay at chance. One seed. 104,896 parameters, 83 seconds of CPU time and
144 of wall-clock time on 2 cores of an AMD EPYC shared with other jobs, with
JAX 0.12.0.1 and Python 3.13.
"""

from configs import repeat


def get_config():
  config = repeat.get_config()

  config.data.name = "recall"
  config.data.length = 256
  config.data.columns = 32
  config.data.pairs = 8

  config.model.token_std = 0.5  # with 0.1, not learned in 1,000 steps

  config.attention.pattern = "Local(2), Local(2) | Global(17)"
  config.attention.mode = "interleaved"

  config.train.steps = 800
  config.train.batch_size = 16
  config.eval.batch_size = 64
  config.eval.sequences = 256
  return config
