"""Starts: what a network is told of the order of an image's symbols."""

from typing import Any

import jax.numpy as jnp
from flax import nnx

from sparse_transformer.model.options.option import Option


class Starts(Option):
  """`data.orders`: sequences start with the sum of a vector of each table.

  Position embeddings are of places in the image, patterns of the scan.
  """

  @property
  def is_used(self) -> bool:
    return bool(self.config.scans)

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    normal = nnx.initializers.normal(self.config.token_std)
    draw = lambda x: normal(rngs.params(), (len(x), self.config.width))
    tables = self.config.scans.tables
    return dict(start={name: draw(x) for name, x in tables.items()})

  def begin(
    self, start: Any, places_BL: Any, labels_BK: Any
  ) -> tuple[Any, Any]:
    scans = self.config.scans
    if labels_BK is None or not labels_BK.shape[1]:  # the identity
      labels_BK = jnp.zeros((1, len(scans)), jnp.int32)
    tables = enumerate(scans.tables)
    start_BD = sum(start[name][...][labels_BK[:, k]] for k, name in tables)
    return start_BD[:, None], scans.places(labels_BK, jnp)[:, places_BL[0]]
