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
    """Returns these inputs with more keywords."""
    # A new dict: the default of `keywords` is shared by all inputs.
    return self._replace(keywords=self.keywords | keywords)


class Layer(NamedTuple):
  """A layer, as its options see it."""

  patterns: tuple[Pattern, ...]  # of its heads
  first: jax.Array | int  # the first position; may be traced
  arrays: Mapping[str, Any]  # of its options, see `Option.arrays`
  # Of whole sequences, of which position t has those before t; None where they
  # are not known.
  symbols_BL: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Option:
  """A part that some networks have.

  The network calls the hooks of all options that its config asks for. A hook
  that an option does not define changes nothing.
  """

  config: Config
  # The names of parameters that have a first axis of layers, or of experts.
  stacked: ClassVar[tuple[str, ...]] = ()
  # The weights of its auxiliary losses, which are added to the nats.
  losses: ClassVar[Mapping[str, float]] = {}

  @property
  def is_used(self) -> bool:
    """Whether the config asks for it."""
    raise NotImplementedError

  # Its parameters.

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    """Draws its parameters by name: arrays, or dicts of them."""
    del rngs
    return {}

  @staticmethod
  def project(params: dict) -> dict:
    """Moves its parameters into their bounds after an update.

    Args:
      params: all parameters of a network, whether it has the option or not.
    """
    return params

  def num_active(self, path: tuple[Any, ...], size: int) -> int:
    """Counts how much of a parameter one position uses, by default all."""
    del path
    return size

  def arrays(self, params: dict) -> dict[str, Any]:
    """Returns what it has in each layer: pytrees of arrays [layers, ...]."""
    return {name: params[name] for name in self.stacked if name in params}

  # The network.

  def begin(
    self, start: Any, places_BL: Any, order_labels_BO: Any
  ) -> tuple[Any, Any]:
    """Returns what sequences start with, and the places of their positions.

    Args:
      start: the start without the option, [D] or [B, 1, D].
      places_BL: the places without it, [1, L] or [B, L].
      order_labels_BO: integers, of the orders of sequences, see
        `data.arrangements`; None for images as they are.
    """
    del order_labels_BO
    return start, places_BL

  def block(self, layer: int, kind: type[ResidualBlock]) -> type[ResidualBlock]:
    """Returns the class of a layer's block; `kind` is that without it.

    A class of its own has another `stack`.
    """
    del layer
    return kind

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    """Returns the inputs of attention; `inputs` are those without it."""
    del layer
    return inputs

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures the inputs of attention, for the log.

    A scalar is an auxiliary loss, whose weight must be in `losses`.
    """
    del layer, inputs
    return {}
