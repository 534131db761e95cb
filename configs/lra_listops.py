"""Values of nested lists, 500 to 2,000 symbols: ListOps of Long Range Arena.

Paper row: none; arXiv 2011.04006: 4 layers of width 512 with 8 heads, an MLP of
1,024, 5,000 steps of 32 expressions. What differs: queries and keys are 256
wide together, not 512; brackets, which its data lack; embeddings of
rows and columns of a table, 50 wide; a cosine decay of the learning rate.

  python train.py --config=configs/lra_listops.py --workdir=runs/lra_listops
  python eval.py --workdir=runs/lra_listops

Expected: not run with these settings, which are for a GPU. 7,420,928
parameters. The most frequent label is right for 17.7 % of expressions.
Published: 36.37 % for dense attention, 17.07 % for a Sparse Transformer, which
was causal.
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
