"""Starts: start vectors that tell the network an image's scan order."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from sparse_transformer.model.options.option import Option


class Starts(Option):
  """`data.orders`: the start vector sums one vector per label of the order.

  Positions are embedded by their places in the image, but patterns count
  positions in scan order.
  """

  @property
  def is_used(self) -> bool:
    return bool(self.config.arrangement)

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    normal = nnx.initializers.normal(self.config.token_std)

    # Draw a table for each label of a scan order, with a vector for each value
    # of the label.
    start = {}
    for name, table in self.config.arrangement.tables.items():
      shape = len(table), self.config.width
      start[name] = normal(rngs.params(), shape)
    return dict(start=start)

  def begin(
    self, start: Any, places_BL: Any, order_labels_BO: Any
  ) -> tuple[Any, Any]:
    arrangement = self.config.arrangement
    if order_labels_BO is None or not order_labels_BO.shape[1]:  # raster order
      order_labels_BO = jnp.zeros((1, len(arrangement)), jnp.int32)

    # Look up one vector from each table, by the labels.
    vectors_BD = []
    for k, name in enumerate(arrangement.tables):
      vectors_BD.append(start[name][...][order_labels_BO[:, k]])
    start_BD = sum(vectors_BD)

    # Find the place in the image of each position of the scan.
    places_BN = arrangement.places(order_labels_BO, jnp)
    return start_BD[:, None], places_BN[:, places_BL[0]]
