"""enwik8, 95M parameters, fixed attention in merged heads.

Paper row: Child et al. 2019, Tables 1 to 3, 0.99 bits/byte on the test split
(0.992 +- 0.001 over 3 seeds). With a minimum context of 6,144 it is 0.9952, and
with 12,160 it is 0.9908. An iteration takes 0.55 s on 8 V100s. The paper states
neither the learning rate nor the batch size.

  python train.py --config=configs/enwik8.py --workdir=runs/enwik8 \\
    --config.data.path=enwik8.zip
  python eval.py --workdir=runs/enwik8 --step=best \\
    --min_context=6144,9216,10752,11904,12096,12160

In the paper: 0.99 bits/byte after 80 epochs. We have not trained this network.
It has 94,949,888 parameters. On one H200, a step took 0.83 s, so all steps
would take 8 hours. The data are at http://mattmahoney.net/dc/enwik8.zip
"""

from configs import default


def get_config():
  config = default.get_config()

  config.data.name = "enwik8"  # paper
  config.data.length = 12_288  # paper
  config.data.columns = 128  # paper: the stride, section 5.3

  config.model.num_layers = 30  # paper
  config.model.num_heads = 8  # paper
  config.model.width = 512  # paper
  config.model.dropout = 0.4  # paper
  config.model.dtype = "bfloat16"  # ours: float16 in the paper

  config.attention.pattern = "fixed"  # paper
  config.attention.mode = "merged"  # paper
  config.attention.stride = 128  # paper
  config.attention.window = 128  # guess: the stride, for local and strided
  config.attention.width = 32  # paper
  config.attention.num_summaries = 4  # sparse_attention: all 128 / 32 of them

  config.optimizer.learning_rate = 0.00035  # guess: as in cifar10.py
  config.optimizer.warmup_steps = 5000  # paper
  config.optimizer.weight_decay = 0.01  # paper

  config.train.steps = 80 * 90_000_000 // (16 * 12_288)  # paper: 80 epochs
  config.train.batch_size = 16  # guess: 2 per GPU, as in cifar10.py
  config.eval.every = 90_000_000 // (16 * 12_288)  # follow-up: each epoch
  config.eval.batch_size = 8  # ours
  config.eval.sequences = 0  # paper
  config.checkpoint.every = config.eval.every  # ours: any may be the best
  return config
