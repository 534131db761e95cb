"""Runs that cannot fit in memory, found from sizes alone.

All bounds are lower ones: nothing that could run is rejected. What a run is
expected to take is in `costs`.
"""

import jax
from ml_collections import ConfigDict

from sparse_transformer import data, machine, model as model_lib
from sparse_transformer.training.analysis import costs
from sparse_transformer.training.distributed import mesh


def check_training(config: ConfigDict, source: data.Source) -> None:
  """Raises ValueError if a run cannot fit in memory; makes no network.

  Only what is certainly in memory at the same time counts: on each device, the
  state with its gradients, or with the input of each layer and the logits of a
  micro-batch; in the memory of the host, a copy of the state while a checkpoint
  is saved; and what validation needs.
  """
  model, sizes, state = _sizes(config, source)
  train, network = config.train, _describe_network(model)
  # At least a device's part of the state is copied.
  is_cpu = jax.default_backend() == "cpu"
  copies = 1 + is_cpu * jax.local_device_count()
  _check_fits(network, copies * state, machine.memory(), "this machine")
  if not train.steps:
    return  # only the initial state is saved
  _check_fits(network, state + state // 4, machine.device_memory())
  positions = costs.num_sequences(config, sizes) * model.length
  positions //= sizes["sequence"]
  layers = model.num_layers * model.width * costs.itemsize(model)
  _check_fits(
    f"train.batch_size={train.batch_size}, train.accumulation="
    f"{train.accumulation} with sequences of {model.length} positions",
    state + positions * (layers + _logits(model)),
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
  """Raises ValueError if evaluation or sampling cannot fit in memory.

  Only the state counts, and of the batch the cache and the residual stream with
  the logits or inside an MLP.

  Args:
    config, source: the experiment's.
    batch: sequences on all devices; `name` sets it.
    cache: bytes of the cache of one sequence, if it is computed position by
      position; None if all positions are computed at once.
  """
  (model, sizes, state), room = _sizes(config, source), machine.device_memory()
  _check_fits(_describe_network(model), state, room)
  mlp = model.mlp_width * costs.itemsize(model)
  position = 4 * model.width + max(_logits(model), mlp)
  whole = position * model.length // sizes["sequence"]
  sequence = whole if cache is None else position + cache
  shards = mesh.num_shards(sizes)
  own = batch if batch % shards else batch // shards
  _check_fits(
    f"{name}={batch} with sequences of {model.length} positions",
    state + own * sequence,
    room,
  )


def _logits(model):
  """Bytes of the logits of a position; a classifier has one for a sequence."""
  return 0 if model.classifies else 4 * model.vocab_size


def _sizes(config, source):
  """The network without patterns, the mesh, and bytes of a device's state."""
  model = model_lib.Config(
    vocab_size=source.vocab_size,
    length=model_lib.num_positions(config.model, source),
    shape=tuple(source.shape),
    patterns=(),
    classes=len(source.classes),
    **config.model,
  )
  sizes = mesh.sizes(config)
  state = costs.abstract_state(config, model)
  return model, sizes, costs.bytes_on_device(state, sizes)


def _describe_network(model: model_lib.Config) -> str:
  return (
    f"a network of {model_lib.count_parameters(model):,} parameters"
    f" (model.num_layers={model.num_layers}, model.width={model.width},"
    f" embeddings of {' + '.join(map(str, model.axes))} rows for"
    f" {model.length} positions)"
  )


def _check_fits(what, size, room, place="a device of this machine"):
  """Raises ValueError if something is larger than the memory of a place."""
  if room is not None and size > room:
    need, found = (f"{x / 2**30:,.1f} GiB" for x in (size, room))
    raise ValueError(
      f"{what} needs at least {need} of memory, but {place} has {found}; use"
      " smaller values"
    )
