"""What a step costs: FLOPs, bytes of the training state, utilization."""

import collections
import itertools
import math
from typing import Any

import jax

from sparse_transformer import model as model_lib, schema
from sparse_transformer.attention import Request, Split, platforms
from sparse_transformer.model.sharding import spec
from sparse_transformer.patterns import analysis
from sparse_transformer.training import step as step_lib
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.optimizer import make_optimizer

# The peak FLOPs per second of devices, by JAX's `device_kind`, for dense matrix
# products in 16 bits. Sources: NVIDIA's white papers on Hopper (H100 SXM5 and
# PCIe; the H200 has the same chip), Ampere (A100) and Volta (V100 SXM2),
# without sparsity; the system architecture pages of Cloud TPU.
PEAKS = {
  "NVIDIA H100 80GB HBM3": 989.4e12,
  "NVIDIA H200": 989.4e12,
  "NVIDIA H100 PCIe": 756e12,
  "NVIDIA A100-SXM4-40GB": 312e12,
  "NVIDIA A100-SXM4-80GB": 312e12,
  "NVIDIA A100-PCIE-40GB": 312e12,
  "NVIDIA A100 80GB PCIe": 312e12,
  "Tesla V100-SXM2-16GB": 125e12,
  "Tesla V100-SXM2-32GB": 125e12,
  "TPU v4": 275e12,
  "TPU v5 lite": 197e12,
  "TPU v5e": 197e12,
  "TPU v5": 459e12,
  "TPU v5p": 459e12,
  "TPU v6 lite": 918e12,
  "TPU v6e": 918e12,
}


def attention_requests(
  config: schema.Config, model: model_lib.Config, platform: str = ""
) -> list[Request]:
  """Describes the attention of a micro-batch, once for each distinct layer.

  They are what the network will ask of `attend`, so that backends can be
  chosen, checked and counted before anything is traced.

  Args:
    config: the experiment's, for its batch and mesh.
    model: its network.
    platform: where it would run, as JAX names it; by default here.
  """
  qk_width, value_width = model.widths
  split = Split()
  if config.mesh.sequence > 1:
    split = Split(positions=("sequence",))
  return [
    Request(
      patterns=patterns,
      batch=config.train.batch_size // config.train.accumulation,
      length=model.length,
      num_key_heads=model.num_key_heads,
      qk_width=qk_width,
      value_width=value_width,
      dtype=model.dtype,
      value_dtype=model.dtype,
      platform=platform or platforms.current_platform(),
      tile=model.tile,
      split=split,
      segments=model.classifies or model.separator is not None,
      sinks=model.sinks,
      bias=model.max_span > 0,
    )
    for patterns in dict.fromkeys(model.patterns)
  ]


def count_pairs(model: model_lib.Config) -> int:
  """Counts the pairs of query and key in one sequence, over all heads.

  Where the content decides, it is the most that there can be.
  """
  heads = collections.Counter(itertools.chain.from_iterable(model.patterns))
  return sum(
    number * analysis.count_pairs(pattern, model.length)
    for pattern, number in heads.items()
  )


def keys_per_query(model: model_lib.Config) -> float:
  """The mean number of keys of a query, over positions, heads and layers."""
  return count_pairs(model) / (model.length * sum(map(len, model.patterns)))


def flops_per_token(model: model_lib.Config) -> dict[str, float]:
  """FLOPs that a token of a step needs, however it is executed.

  The backward pass counts as twice the forward pass, and recomputation not at
  all. Of attention, the pairs of the patterns count; of experts, those that a
  position passes through.
  Source: Chowdhery et al. 2022 (PaLM), appendix B.

  Returns those of `weights` and of `attention`, and their `total`.
  """
  # A pair takes two FLOPs for each number of its query and of its value, and
  # the backward pass takes twice that.
  weights = 3 * _weight_flops(model)
  attention = 6 * sum(model.widths) * count_pairs(model) / model.length
  return dict(weights=weights, attention=attention, total=weights + attention)


def _weight_flops(model: model_lib.Config) -> int:
  """FLOPs of a token's forward pass in products with weights."""
  products = model_lib.count_active_parameters(model, name="kernel")
  # A classifier's output layer runs once for a sequence, not for a token.
  if model.classifies:
    products -= model.width * model.outputs
  return 2 * products


def speed(
  tokens_per_second: float, model: model_lib.Config
) -> dict[str, float]:
  """The speed fields of a line of metrics.

  Args:
    tokens_per_second: of all devices together; 0 if it is unknown.
    model: the network.

  Returns:
    `tokens_per_second`, `model_flops_per_second`, and, for devices in `PEAKS`,
    `mfu`: model FLOPs utilization, as a fraction of their peak in 16 bits. None
    of them for an unknown speed.
  """
  if not tokens_per_second:
    return {}

  flops = tokens_per_second * flops_per_token(model)["total"]
  fields = dict(
    tokens_per_second=tokens_per_second, model_flops_per_second=flops
  )

  # Unknown devices have no utilization, rather than a wrong one.
  devices = jax.devices()
  if peak := PEAKS.get(devices[0].device_kind):
    fields["mfu"] = flops / (peak * len(devices))
  return fields


def memory(config: schema.Config, model: model_lib.Config) -> dict[str, int]:
  """Bytes of the training state and of its gradients on one device.

  Returns `parameters`, `optimizer`, `average`, `gradients`, and their `total`.
  Activations are not in it: `Experiment.compile_step` says what they need.
  """
  state = abstract_state(config, model)
  sizes = mesh.sizes(config)
  weights = bytes_on_device(state.params, sizes)
  parts = dict(
    parameters=weights,
    optimizer=bytes_on_device(state.opt_state, sizes),
    average=bytes_on_device(state.ema, sizes),
    # Those of one micro-batch and, if there are several, also their sum.
    gradients=weights * min(config.train.accumulation, 2),
  )
  return parts | dict(total=sum(parts.values()))


def bytes_on_device(tree: Any, sizes: mesh.Sizes) -> int:
  """Bytes that a training state, or a part of one, takes on each device.

  Args:
    tree: arrays, or their shapes and dtypes.
    sizes: the devices along each axis of the mesh.
  """
  total = 0
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    # An array is split over some axes of the mesh, and copied along the others.
    devices = math.prod(sizes[axis] for axis in spec(path, x) if axis)
    total += math.prod(x.shape) * x.dtype.itemsize // devices

  return total


def abstract_state(
  config: schema.Config, model: model_lib.Config
) -> step_lib.State:
  """The shapes and dtypes of a network's training state.

  Nothing is computed, and no device is used. Raises ValueError if the schedule
  of the learning rate is invalid.
  """
  optimizer = make_optimizer(config)
  return jax.eval_shape(
    lambda params: step_lib.init_state(params, optimizer, model.dtype),
    model_lib.param_shapes(model),
  )
