"""Digits in other orders, of which the network is told, or just more images.

Paper row: none; the augmentation of Jun et al. 2020 on a small data set, with
data.orders=("rotation",) and others. The sources digits_rotated and
digits_puzzles have the same images as copies: each of the training split in all
its orders, with positions and a start like any other image.

  python train.py --config=configs/digits_orders.py --workdir=runs/orders

Expected on the validation split, with seeds 0 to 2: 1.79 bits/dim without
orders, 1.88 with rotation, 2.02 with rotation, transposition and jigsaw; 1.90
and 2.15 with their copies. 203,328 parameters, 92 s on a core of an AMD EPYC.
"""

import dataclasses
import functools
import itertools

import numpy as np

from configs import digits
from sparse_transformer import data
from sparse_transformer.data import images


def register(name, *orders):
  @data.register(name, reads_path=False)
  def copies(config):
    source = images.digits(config)
    tables = data.Orders(orders, source.shape).tables.values()
    labels = itertools.product(*(range(len(table)) for table in tables))
    places = data.Orders(orders, source.shape).places(np.array([*labels]))

    @functools.cache
    def load():
      train, *others = source.load().values()
      rows = train.reshape(-1, source.length)[:, places.T].swapaxes(1, 2)
      splits = (rows.reshape(-1, *source.shape), *others)
      return dict(zip(data.SPLITS, splits, strict=True))

    return dataclasses.replace(source, load=load)


register("digits_rotated", "rotation")
register("digits_puzzles", "rotation", "transposition", "jigsaw")


def get_config():
  config = digits.get_config()

  config.model.num_layers = 4
  config.model.num_heads = 2
  config.model.width = 64
  config.model.dropout = 0.0

  config.optimizer.learning_rate = 0.003

  config.train.steps = 2000
  config.eval.every = 250
  config.checkpoint.every = 250
  return config
