"""Text on a CPU with a mixture of experts: text_small.py with 8 experts.

Paper row: none; every second block has 8 experts, each as wide as the MLP of
the others, and each byte passes through two of them.

  python train.py --config=configs/text_experts.py \\
    --workdir=runs/text_experts --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_experts

Expected: not known; no record is kept. 2,713,728 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.model.experts = 8
  return config
