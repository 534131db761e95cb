"""Runs that cannot fit in memory, found before their networks are made.

All bounds are lower ones and follow from sizes alone: nothing that could run is
rejected. What a run is expected to take is in `costs`.
"""

import jax
from ml_collections import ConfigDict

from sparse_transformer import data, machine, model as model_lib
from sparse_transformer.training import costs, mesh


def check_training(config: ConfigDict, source: data.Source) -> None:
  """Checks that a run may fit in memory, without making its network.

  Only what is certainly in memory at the same time counts: on each device, the
  state with its gradients, or with the input of each layer and the logits of a
  micro-batch; in the memory of the host, a copy of the state while a checkpoint
  is saved; and what validation needs. What XLA, patterns and data take does not
  count, nor does what `model.remat` keeps.

  Args:
    config: the experiment's config.
    source: its data source.

  Raises:
    ValueError: the run needs more memory than there is.
  """
  model, train = _without_patterns(config, source), config.train
  sizes, network = mesh.sizes(config), _describe_network(model)
  weights = _weights_on_device(model, sizes)
  state = 4 * weights  # the weights, two moments of the optimizer, the average
  on_host = state  # at least a device's part is copied
  if jax.default_backend() == "cpu":
    on_host += state * jax.local_device_count()
  _check_fits(network, on_host, machine.memory(), "this machine")
  if not train.steps:
    return  # only the initial state is saved
  _check_fits(network, state + weights, machine.device_memory())
  positions = costs.num_sequences(config, sizes) * model.length
  positions //= sizes["sequence"]
  layers = model.num_layers * model.width * costs.itemsize(model)
  logits = 4 * model.vocab_size
  _check_fits(
    f"train.batch_size={train.batch_size}, train.accumulation="
    f"{train.accumulation} with sequences of {model.length} positions",
    state + positions * (layers + logits),
    machine.device_memory(),
  )
  check_inference(config, source, config.eval.batch_size)


def check_inference(
  config: ConfigDict,
  source: data.Source,
  batch: int,
  *,
  name: str = "eval.batch_size",
  cache: int | None = None,
) -> None:
  """Checks that evaluation or sampling may fit in memory.

  As in `check_training`, only what is certainly needed counts: the state
  that is restored, and of the batch the cache and the residual stream with the
  logits or inside an MLP.

  Args:
    config: the experiment's config.
    source: its data source.
    batch: sequences on all devices.
    name: what sets `batch`.
    cache: bytes of the cache of one sequence, if it is computed position by
      position; None if all positions are computed at once.

  Raises:
    ValueError: it needs more memory than there is.
  """
  model, room = _without_patterns(config, source), machine.device_memory()
  sizes = mesh.sizes(config)
  state = 4 * _weights_on_device(model, sizes)
  _check_fits(_describe_network(model), state, room)
  stream, logits = 4 * model.width, 4 * model.vocab_size
  mlp = model.mlp_width * costs.itemsize(model)
  positions = model.length if cache is None else 1
  sequence = (stream + max(logits, mlp)) * positions + (cache or 0)
  if cache is None:
    sequence //= sizes["sequence"]
  shards = mesh.num_shards(sizes)
  own = batch if batch % shards else batch // shards
  _check_fits(
    f"{name}={batch} with sequences of {model.length} positions",
    state + own * sequence,
    room,
  )


def _weights_on_device(model: model_lib.Config, sizes: mesh.Sizes) -> int:
  params = jax.eval_shape(lambda: model_lib.init_params(model, 0))
  return costs.bytes_on_device(params, sizes)


def _without_patterns(
  config: ConfigDict, source: data.Source
) -> model_lib.Config:
  """The sizes of a network whose patterns, which take longer, are not made."""
  return model_lib.Config(
    vocab_size=source.vocab_size,
    length=source.length,
    shape=tuple(source.shape),
    patterns=(),
    **config.model,
  )


def _describe_network(model: model_lib.Config) -> str:
  return (
    f"a network of {model_lib.count_parameters(model):,} parameters"
    f" (model.num_layers={model.num_layers}, model.width={model.width},"
    f" embeddings of {' + '.join(map(str, model.axes))} rows for"
    f" {model.length} positions)"
  )


def _check_fits(
  what: str,
  size: int,
  room: int | None,
  place: str = "a device of this machine",
) -> None:
  """Raises ValueError if something is larger than the memory of a place."""
  if room is not None and size > room:
    need, found = (f"{x / 2**30:,.1f} GiB" for x in (size, room))
    raise ValueError(
      f"{what} needs at least {need} of memory, but {place} has {found}; use"
      " smaller values"
    )
