"""Options that extend the paper's network, each in its own file."""

import functools
from typing import Any

from sparse_transformer.model.configure import Config
from sparse_transformer.model.options.directions import Directions
from sparse_transformer.model.options.experts import Experts
from sparse_transformer.model.options.learned_spans import LearnedSpans
from sparse_transformer.model.options.option import (
  Inputs as Inputs,
  Layer as Layer,
  Option as Option,
)
from sparse_transformer.model.options.rotary import Rotary
from sparse_transformer.model.options.sinks import Sinks
from sparse_transformer.model.options.starts import Starts

# The network calls the hooks of these options in this order, and refers to no
# option by name. To remove an option, delete its file, its import and its line
# here.
ALL: tuple[type[Option], ...] = (
  Directions,
  LearnedSpans,
  Sinks,
  Rotary,
  Starts,
  Experts,
)

STACKED = {name for option in ALL for name in option.stacked}
LOSS_WEIGHTS: dict[str, float] = {}
for _option in ALL:
  LOSS_WEIGHTS |= _option.losses


@functools.lru_cache(maxsize=64)
def of(config: Config) -> tuple[Option, ...]:
  """Returns the options that a network uses."""
  options = [kind(config) for kind in ALL]
  return tuple(option for option in options if option.is_used)


def project(params: dict) -> dict:
  """Clips parameters to their bounds after an update."""
  for kind in ALL:
    params = kind.project(params)
  return params


def arrays(config: Config, params: dict) -> dict[str, Any]:
  """Returns the arrays of all options, stacked by layer.

  Args:
    config: config of the network.
    params: parameters of the network, as nested dicts.

  Returns:
    {name: a pytree of arrays with a first axis of layers}.
  """
  by_name: dict[str, Any] = {}
  for option in of(config):
    by_name |= option.arrays(params)
  return by_name


def prepare(config: Config, layer: Layer, inputs: Inputs) -> Inputs:
  """Applies all options, one after another, to the inputs of attention."""
  for option in of(config):
    inputs = option.inputs(layer, inputs)
  return inputs


def measure(config: Config, layer: Layer, inputs: Inputs) -> dict[str, Any]:
  """Collects the measurements of all options for one layer's attention.

  Scalar measurements are auxiliary losses. Each option must use its own names
  of measurements.
  """
  measured: dict[str, Any] = {}
  for option in of(config):
    measured |= option.measure(layer, inputs)
  return measured
