"""Text on a CPU with blocks chosen by each query: text_small.py, `TopBlocks`.

Paper row: none; Lu et al. 2025 with blocks of 16 bytes, of which a byte sees
its own, up to itself, and the four past ones that score best.

  python train.py --config=configs/text_top_blocks.py \\
    --workdir=runs/text_top_blocks --config.data.path=enwiki-sample.xml.bz2
  python eval.py --workdir=runs/text_top_blocks

Expected with --config.train.steps=3514, 814 processor seconds: 2.62 bits/byte
on the validation split, where the pattern of text_small.py reaches 2.47 in the
same time (docs/evidence.md). 867,712 parameters.
"""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.attention.pattern = "Block(16) | TopBlocks(16, 4)"
  return config
