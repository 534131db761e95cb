"""Text on a CPU with keys found by hashing: text_small.py with `LSH`.

Paper row: none; Kitaev et al. 2020 attend within chunks of sorted hashes, which
leaks later positions. Here a byte sees the last 64 bytes and, in each of two
rounds, the last 16 before it that have the same of 16 hashes.

  python train.py --config=configs/text_lsh.py --workdir=runs/text_lsh \\
    --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_lsh

Expected with --config.train.steps=3215, 814 processor seconds: 2.83 bits/byte
on the validation split, where the pattern of text_small.py reaches 2.47 in the
same time (docs/evidence.md). 867,712 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.attention.pattern = "Local(64) | LSH(16, buckets=16, rounds=2)"
  return config
