"""Movie reviews of up to 1,000 bytes: the task Text of Long Range Arena.

Paper row: none. The task is from arXiv 2011.04006, which uses 4 layers of width
256 with 4 heads, an MLP of width 1,024, and 20,000 steps of 32 texts. Texts
have 1,000 bytes, as in its code, whereas its paper says 4,000. This config
differs in the following ways. The sequence is laid out as a grid with 50
columns; the embedding of a position is the sum of those of its row and column.
The learning rate decays along a cosine.

  python train.py --config=configs/lra_text.py --workdir=runs/lra_text \\
    --config.data.path=aclImdb
  python eval.py --workdir=runs/lra_text

The data are those of Maas et al. 2011: the folders `train` and `test`, each
with the folders `pos` and `neg`. Remove `train/unsup`. The benchmark validates
on the test split. Here, the end of each class in `train` is the validation
split, in proportion to `data.fractions`, unless there is a folder `val` beside
`train` and `test`.

Expected: not known, because we have not run this config: the data are not part
of this repository. The network has 3,243,520 parameters. Published accuracies:
64.27 % for dense attention, and 63.58 % for a Sparse Transformer.
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
