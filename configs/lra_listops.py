"""Nested lists of 500 to 2,000 symbols: the task ListOps of Long Range Arena.

Paper row: none. The task is from arXiv 2011.04006, which uses 4 layers of width
512 with 8 heads, an MLP of width 1,024, and 5,000 steps of 32 expressions. This
config differs in the following ways. Queries and keys are 256 wide over all
heads, not 512. Expressions contain brackets, which the benchmark's data lack.
The sequence is laid out as a grid with 50 columns; the embedding of a position
is the sum of those of its row and column. The learning rate decays along a
cosine.

  python train.py --config=configs/lra_listops.py --workdir=runs/lra_listops
  python eval.py --workdir=runs/lra_listops

Expected: not known, because we have not run these settings, which are meant for
a GPU. The network has 7,420,928 parameters. Always predicting the most frequent
label is right for 17.7 % of the expressions. Published accuracies: 36.37 % for
dense attention, and 17.07 % for a Sparse Transformer, which was causal.
"""

from configs import lra_image


def get_config():
  config = lra_image.get_config()

  config.data.name = "listops"
  config.data.length = 2000
  config.data.columns = 50

  config.model.num_layers = 4
  config.model.width = 512
  config.model.dropout = 0.1

  config.attention.stride = 50
  config.attention.window = 50
  config.attention.width = 10

  config.optimizer.warmup_steps = 1000

  config.train.steps = 5000
  config.train.batch_size = 32
  config.eval.every = 500
  config.eval.batch_size = 32
  config.checkpoint.every = 500
  return config
