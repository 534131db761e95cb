"""DNA from any FASTA file: strided attention over 1,024 bases.

Paper row: none. This is the network of text_small.py with strided attention.

  python train.py --config=configs/genome.py --workdir=runs/genome \\
    --config.data.path=ecoli-k12-mg1655.fasta.gz
  python eval.py --workdir=runs/genome

Expected: 1.979 bits/base on the test split of E. coli K-12 after 200 steps, 50
of them warm-up, which take 2 minutes of CPU time on an AMD EPYC. For
comparison, independent bases need 2 bits each. We have not done the full run.
The network has 802,688 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()

  config.data.name = "fasta"
  config.data.length = 1024
  config.data.columns = 32

  config.attention.pattern = "strided"
  config.attention.mode = "interleaved"
  config.attention.stride = 32
  config.attention.window = 32

  config.train.steps = 3000
  config.eval.batch_size = 8
  return config
