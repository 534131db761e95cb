"""CIFAR-10, 59M parameters, with fixed attention, the paper's pattern for text.

Paper row: Child et al. 2019, Table 2, 2.85 bits/dim. An iteration takes 0.47 s
on 8 V100s. The paper does not say which fixed pattern it used. This config uses
that of the paper's enwik8 network, with different summary positions for each of
the two heads.

  python train.py --config=configs/cifar10_fixed.py --workdir=runs/cifar10_fixed

In the paper: 2.85 bits/dim after 120 epochs. We have not trained this network.
It has 59,196,928 parameters.
"""

from configs import cifar10


def get_config():
  config = cifar10.get_config()

  config.attention.pattern = "fixed"  # paper
  config.attention.mode = "merged"  # guess: as in enwik8.py
  config.attention.cycle = ()  # guess: with mode=interleaved, 1 : 1
  config.attention.stride = 128  # guess: as in enwik8.py
  config.attention.width = 32  # guess: as in enwik8.py
  config.attention.num_summaries = 2  # paper: distinct, section 4.3
  return config
