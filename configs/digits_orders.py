"""Digits in permuted orders, with or without telling the network the order.

Paper row: none. This applies the augmentation of Jun et al. 2020 to a small
data set. With data.orders=("rotation",) or other permutations, the start vector
and the coordinates of the pixels tell the network the order. The data sets
digits_rotated and digits_puzzles add permuted copies to the training images
instead, and do not tell the network the order.

  python train.py --config=configs/digits_orders.py --workdir=runs/orders

Expected on the validation split, as the mean of seeds 0 to 2: 1.79 bits/dim
without orders, 1.88 with rotation, and 2.02 with rotation, transposition and
jigsaw. With permuted copies instead: 1.90 and 2.15. Without orders, the network
has 203,328 parameters, and training takes 92 s of CPU time.
"""

import dataclasses
import functools
import itertools

import numpy as np

from configs import digits
from sparse_transformer import data
from sparse_transformer.data import images


def add_copies(name, *orders):
  """Registers digits with a copy of each training image in each order."""

  @data.register(name, reads_path=False)
  def copies(config):
    source = images.digits(config)
    every = data.arrangements.of(orders, source.shape)
    numbers = (range(len(table)) for table in every.tables.values())
    places = every.places(np.array([*itertools.product(*numbers)]))

    @functools.cache
    def load():
      train, *others = source.load().values()
      rows = train.reshape(-1, source.length)[:, places.T].swapaxes(1, 2)
      splits = (rows.reshape(-1, *source.shape), *others)
      return dict(zip(data.SPLITS, splits, strict=True))

    return dataclasses.replace(source, load=load)


if "digits_rotated" not in data.SOURCES:  # this file may be read twice
  add_copies("digits_rotated", "rotation")
  add_copies("digits_puzzles", "rotation", "transposition", "jigsaw")


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
