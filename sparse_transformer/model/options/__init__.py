"""What networks can have besides the paper's: options, each in its own file.

The network calls the hooks of the options that its config asks for, in the
order of `ALL`, and names none of them.
"""

import functools
from typing import Any

import jax

from sparse_transformer.attention.content.spans import span_of
from sparse_transformer.model.hyperparameters import Config
from sparse_transformer.model.options.directions import (
  Directions,
  has_centroids,
)
from sparse_transformer.model.options.learned_spans import (
  LearnedSpans,
  project as project,
)
from sparse_transformer.model.options.mixture import (
  Mixture,
  block_kinds as block_kinds,
  num_active as num_active,
)
from sparse_transformer.model.options.option import (
  Inputs as Inputs,
  Layer as Layer,
  Option as Option,
)
from sparse_transformer.model.options.rotary import Rotary
from sparse_transformer.model.options.sinks import Sinks
from sparse_transformer.patterns.content import Content

ALL = Mixture, Directions, LearnedSpans, Sinks, Rotary
STACKED = {"blocks"}.union(*(option.stacked for option in ALL))
# Of the auxiliary losses that blocks measure, means over their blocks.
LOSS_WEIGHTS = {x: w for option in ALL for x, w in option.losses.items()}


@functools.lru_cache(maxsize=64)
def of(config: Config) -> tuple[Option, ...]:
  """The options that a network has."""
  return tuple(x for x in (option(config) for option in ALL) if x.is_used)


def learned_patterns(config: Config) -> list[list[set[Content]]]:
  """By layer and head: its patterns whose parameters are of the network."""
  is_learned = lambda x: has_centroids(x) or span_of(x) is not None
  return [
    [{*filter(is_learned, pattern.contents())} for pattern in heads]
    for heads in config.patterns
  ]


def own_params(config: Config, params: dict) -> dict[str, Any]:
  """The parameters of options, with a first axis of layers."""
  blocks = {kind.stack for kind in block_kinds(config)}
  return {x: params[x] for x in (STACKED & params.keys()) - blocks}


def prepare(config: Config, layer: Layer, inputs: Inputs) -> Inputs:
  """What attention is given in a layer, from that without options."""
  for option in of(config):
    inputs = option.inputs(layer, inputs)
  return inputs


def measure(
  config: Config, layer: Layer, inputs: Inputs
) -> dict[str, jax.Array]:
  """What options measure of the inputs of a layer."""
  found = (option.measure(layer, inputs) for option in of(config))
  return {name: x for measured in found for name, x in measured.items()}


def num_stacks(path: tuple[Any, ...]) -> int:
  """Number of axes along which the parameter at a path is stacked."""
  return len(STACKED & {key.key for key in path})
