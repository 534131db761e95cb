"""The protocol of options: the hooks that the network calls."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
from flax import nnx

from sparse_transformer.model.configure import Config
from sparse_transformer.patterns import Pattern


class Inputs(NamedTuple):
  """What `attention.attend` is given in a layer."""

  q_BLHK: jax.Array
  k_BLGK: jax.Array
  v_BLGE: jax.Array
  keywords: dict[str, Any] = {}

  def add_directions(self, of_patterns: dict[Any, jax.Array]) -> "Inputs":
    """These inputs, with the directions of more patterns."""
    both = self.keywords.get("directions", {}) | of_patterns
    return self._replace(keywords=self.keywords | dict(directions=both))


class Layer(NamedTuple):
  """A layer, as its options see it."""

  patterns: tuple[Pattern, ...]  # of its heads
  first: jax.Array | int  # the first position; may be traced
  own: Mapping[str, Any]  # what options have in this layer, see `Option.own`


@dataclasses.dataclass(frozen=True)
class Option:
  """A part that some networks have; a hook that it leaves out does nothing."""

  config: Config
  # The names of parameters that have a first axis of layers.
  stacked: ClassVar[tuple[str, ...]] = ()
  # The weights of its auxiliary losses, which are added to the nats.
  losses: ClassVar[Mapping[str, float]] = {}

  @property
  def is_used(self) -> bool:
    """Whether the config asks for it."""
    raise NotImplementedError

  def init(self, rngs: nnx.Rngs) -> dict[str, Any]:
    """Draws its parameters by name: arrays, or dicts of them."""
    del rngs
    return {}

  def own(self, params: dict) -> dict[str, Any]:
    """What it has in the layers: pytrees of arrays [layers, ...], by name."""
    return {name: params[name] for name in self.stacked if name in params}

  def begin(
    self, start: Any, places_BL: Any, labels_BK: Any
  ) -> tuple[Any, Any]:
    """What sequences with labels start with, and the places of positions.

    By default `start` and `places_BL` [1, L], the same for all sequences.
    """
    del labels_BK
    return start, places_BL

  def inputs(self, layer: Layer, inputs: Inputs) -> Inputs:
    """What attention is given, from `inputs` without the option."""
    del layer
    return inputs

  def measure(self, layer: Layer, inputs: Inputs) -> dict[str, jax.Array]:
    """Measures what attention was given: scalars are auxiliary losses."""
    del layer, inputs
    return {}
