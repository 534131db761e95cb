"""ImageNet 64 x 64, 152M parameters: the follow-up's schedule.

Paper row: none in Child et al. 2019. This is preset i64_150m of the follow-up's
released code (Jun et al. 2020), which trains the paper's network.

  python train.py --config=configs/imagenet64_150m.py \\
    --workdir=runs/imagenet64_150m --config.data.path=FOLDER
  python eval.py --workdir=runs/imagenet64_150m --step=best

Expected: not known, because we have not trained this network. It has
151,645,184 parameters. The learning rate decays over 10,000 epochs, which is
far more than the network needs. As in the follow-up, stop the run when its
score on the validation split no longer improves.
"""

from configs import imagenet64


def get_config():
  config = imagenet64.get_config()

  config.model.dropout = 0.005  # follow-up

  config.optimizer.warmup_steps = 15_000  # follow-up
  config.optimizer.weight_decay = 0.001  # follow-up

  config.train.steps = 10_000 * 1_231_149 // 128  # follow-up: 10,000 epochs
  return config
