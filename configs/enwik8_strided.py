"""enwik8, 95M parameters, strided attention, the paper's pattern for images.

Paper row: Child et al. 2019, Table 2, 1.13 bits/byte. An iteration takes 0.35 s
on 8 V100s. The paper does not say how its heads combine local and strided
attention.

  python train.py --config=configs/enwik8_strided.py \\
    --workdir=runs/enwik8_strided --config.data.path=enwik8.zip

In the paper: 1.13 bits/byte after 80 epochs. We have not trained this network.
It has 94,949,888 parameters.
"""

from configs import enwik8


def get_config():
  config = enwik8.get_config()
  config.attention.pattern = "strided"  # paper
  config.attention.mode = "merged"  # guess: as with fixed attention
  return config
