"""Text on a CPU with a mixture of experts: text_small.py with 8 experts.

Paper row: none. Every second block has 8 experts, each as wide as the MLP of
the other blocks. Each byte passes through two of them.

  python train.py --config=configs/text_experts.py \\
    --workdir=runs/text_experts --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_experts

Expected: not known, because there is no record of a run. The network has
2,713,728 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.model.experts = 8
  return config
