"""Movie reviews by their bytes, up to 1,000: Text of Long Range Arena.

Paper row: none; arXiv 2011.04006: 4 layers of width 256 with 4 heads, an MLP of
1,024, 20,000 steps of 32 texts of 1,000 bytes, as in its code; its paper says
4,000. What differs: embeddings of rows and columns of a table, 50 wide; a
cosine decay of the learning rate.

  python train.py --config=configs/lra_text.py --workdir=runs/lra_text \\
    --config.data.path=aclImdb
  python eval.py --workdir=runs/lra_text

The data are those of Maas et al. 2011, folders `train` and `test` which have
`pos` and `neg`; LRA validates on the test split. Here, the end of each class in
`train` is the validation split, by `data.fractions`, unless a folder `val`
stands beside them. Remove `train/unsup`.

Expected: not run, since the data are not part of this repository. 3,243,520
parameters. Published: 64.27 % for dense attention, 63.58 % for a Sparse
Transformer.
"""

from configs import lra_listops


def get_config():
  config = lra_listops.get_config()

  config.data.name = "labelled"
  config.data.length = 1000

  config.model.width = 256
  config.model.num_heads = 4
  config.model.half_size = False

  config.optimizer.warmup_steps = 2000

  config.train.steps = 20_000
  return config
