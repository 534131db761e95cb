"""What networks can have besides the paper's: options, each in its own file."""

import functools
from typing import Any

from sparse_transformer.model.configure import Config
from sparse_transformer.model.options.directions import Directions
from sparse_transformer.model.options.learned_spans import (
  LearnedSpans,
  project as project,
)
from sparse_transformer.model.options.option import (
  Inputs as Inputs,
  Layer as Layer,
  Option as Option,
)
from sparse_transformer.model.options.rotary import Rotary
from sparse_transformer.model.options.sinks import Sinks
from sparse_transformer.model.options.starts import Starts

# The network calls their hooks in this order, and names none of them.
ALL = Directions, LearnedSpans, Sinks, Rotary, Starts
STACKED = {name for option in ALL for name in option.stacked}
LOSSES = {x: weight for option in ALL for x, weight in option.losses.items()}


@functools.lru_cache(maxsize=64)
def of(config: Config) -> tuple[Option, ...]:
  """The options that a network has."""
  return tuple(x for x in (option(config) for option in ALL) if x.is_used)


def own(config: Config, params: dict) -> dict[str, Any]:
  """What the options of a network have in the layers, see `Option.own`."""
  return {k: x for option in of(config) for k, x in option.own(params).items()}


def prepare(config: Config, layer: Layer, inputs: Inputs) -> Inputs:
  """What attention is given in a layer, from `inputs` without options."""
  for option in of(config):
    inputs = option.inputs(layer, inputs)
  return inputs


def measure(config: Config, layer: Layer, inputs: Inputs) -> dict[str, Any]:
  """What options measure of the inputs of a layer."""
  found = [option.measure(layer, inputs) for option in of(config)]
  return {name: x for measured in found for name, x in measured.items()}
