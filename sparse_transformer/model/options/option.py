"""The protocol of options: the hooks that the network calls."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from sparse_transformer.model.block import ResidualBlock
from sparse_transformer.model.configure import Config
from sparse_transformer.patterns import Pattern


class Inputs(NamedTuple):
  """The arguments of `attention.attend` in a layer.

  Options return changed copies.
  """

  q_BLHK: jax.Array
  k_BLGK: jax.Array
  v_BLGE: jax.Array
  keywords: dict[str, Any] = {}

  def add(self, **keywords: Any) -> "Inputs":
    """Returns these inputs with additional keywords."""
    # This makes a new dict, because all inputs share the default of `keywords`.
    return self._replace(keywords=self.keywords | keywords)


class Layer(NamedTuple):
  """The properties of a layer that options may use."""

  patterns: tuple[Pattern, ...]  # patterns of the layer's heads
  first: jax.Array | int  # the first position, which may be traced
  arrays: Mapping[str, Any]  # arrays of the options, see `Option.arrays`
  # Symbols of whole sequences; position t may use only symbols before t. None
  # if they are not known.
  symbols_BL: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Option:
  """An optional extension of the network.

  The network calls the hooks of all options that its config uses. By default, a
  hook changes nothing.
  """

  config: Config
  # The names of parameters whose first axis is layers, or experts.
  stacked: ClassVar[tuple[str, ...]] = ()
  # The weights of the option's auxiliary losses, which are added to the loss in
  # nats.
  losses: ClassVar[Mapping[str, float]] = {}

  @property
  def is_used(self) -> bool:
    """Whether the config uses the option."""
    raise NotImplementedError

  # Hooks for parameters.

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    """Draws the option's parameters: {name: an array, or a dict of arrays}."""
    del rngs
    return {}

  @staticmethod
  def project(params: dict) -> dict:
    """Clips the option's parameters to their bounds after an update.

    Args:
      params: all parameters of a network, whether or not the network uses the
        option.
    """
    return params

  def num_active(self, path: tuple[Any, ...], size: int) -> int:
    """Counts the elements of a parameter that one position uses.

    By default, a position uses all `size` elements.
    """
    del path
    return size

  def arrays(self, params: dict) -> dict[str, Any]:
    """Returns the option's arrays: {name: a pytree of arrays [layers, ...]}."""
    return {name: params[name] for name in self.stacked if name in params}

  # Hooks for the network.

  def begin(
    self, start: Any, places_BL: Any, order_labels_BO: Any
  ) -> tuple[Any, Any]:
    """Returns start vectors, and the place at which each position is embedded.

    Args:
      start: the start vector without the option, [D] or [B, 1, D].
      places_BL: the places without the option, [1, L] or [B, L].
      order_labels_BO: integers that identify the order of each sequence, see
        `data.arrangements`; None for images in raster order.
    """
    del order_labels_BO
    return start, places_BL

  def block(self, layer: int, kind: type[ResidualBlock]) -> type[ResidualBlock]:
    """Returns the class of a layer's block.

    `kind` is the block's class without the option. If the option returns a new
    class, the new class must define a different `stack`.
    """
    del layer
    return kind

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    """Returns the inputs of attention, changed by the option."""
    del layer
    return inputs

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures the inputs of attention, for the log.

    Each scalar is an auxiliary loss, so `losses` must contain its weight.
    """
    del layer, inputs
    return {}
