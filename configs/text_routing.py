"""Text on a CPU with keys found by clustering: text_small.py with `Routing`.

Paper row: none; Roy et al. 2020 let each cluster take the positions nearest to
its centroid, which leaks later ones. Here a byte sees the last 64 bytes and the
last 32 in its cluster, one of 8, whose centroids are learned.

  python train.py --config=configs/text_routing.py \\
    --workdir=runs/text_routing --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_routing

Expected with --config.train.steps=3689, 793 processor seconds: 2.71 bits/byte
on the validation split, where the pattern of text_small.py reaches 2.47 in the
same time (docs/evidence.md). 871,808 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.attention.pattern = "Local(64) | Routing(clusters=8, window=32)"
  return config
