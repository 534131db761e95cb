"""ImageNet 64 x 64, 303M parameters: twice the layers of imagenet64_150m.py.

Paper row: Child et al. 2019 show samples of a network of this size, but report
no score. This is preset i64_300m of the follow-up's released code (Jun et al.
2020).

  python train.py --config=configs/imagenet64_300m.py \\
    --workdir=runs/imagenet64_300m --config.data.path=FOLDER
  python eval.py --workdir=runs/imagenet64_300m --step=best

Expected: not known, because we have not trained this network. It has
302,959,616 parameters. The learning rate decays over 10,000 epochs, as in
imagenet64_150m.py.
"""

from configs import imagenet64_150m


def get_config():
  config = imagenet64_150m.get_config()
  config.model.num_layers = 96  # follow-up
  config.train.batch_size = 128  # follow-up: 2 per GPU, on 64 GPUs
  return config
