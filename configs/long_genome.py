"""DNA at 8,192 bases of context on a CPU.

Paper row: none; the network of long_text.py.

  python -m sparse_transformer.compare --config=configs/long_genome.py \\
    --config.data.path=ecoli-k12-mg1655.fasta.gz \\
    --vary=attention.pattern=local,strided \\
    --budget=steps:2000 --seeds=3 --workdir=runs/long_genome
  python train.py --config=configs/long_genome.py --workdir=runs/strided \\
    --config.data.path=ecoli-k12-mg1655.fasta.gz

Expected: 1.8757 ± 0.0025 bits/base on the validation split with strided, 1.8783
± 0.0149 with local, mean of 3 seeds ± half of its 95 % confidence interval;
1.8899 ± 0.0027 on the test split with strided.
13 minutes of processor time of an AMD EPYC each. 112,960 parameters.
Independent bases take 2 bits.
"""

from configs import long_text


def get_config():
  config = long_text.get_config()

  config.data.name = "fasta"
  config.data.length = 8192

  config.train.steps = 2000
  config.eval.batch_size = 2
  config.eval.sequences = 0
  config.eval.every = 500
  config.checkpoint.every = 500
  return config
