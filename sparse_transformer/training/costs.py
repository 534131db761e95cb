"""The cost of a step: FLOPs, bytes of the training state, utilization."""

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

# Peak FLOPs per second of each device, by JAX's `device_kind`, for 16-bit
# matrix products without structured sparsity. Sources: NVIDIA's white papers on
# Hopper (H100 SXM5 and PCIe; the H200 has the same chip), Ampere (A100) and
# Volta (V100 SXM2); the system architecture pages of Cloud TPU.
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
  """Describes the calls of `attend` for a micro-batch.

  There is one request for each distinct tuple of patterns in the layers.
  Callers use these requests to choose and check backends, and to count costs,
  before anything is traced.

  Args:
    config: the config of the experiment, which defines batch and mesh.
    model: the config of its network.
    platform: the platform to run on, as JAX names it; by default, the current
      one.
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
  """Counts the query-key pairs in one sequence, over all layers and heads.

  For content-based patterns, it counts the maximum possible number of pairs.
  """
  heads = collections.Counter(itertools.chain.from_iterable(model.patterns))
  return sum(
    number * analysis.count_pairs(pattern, model.length)
    for pattern, number in heads.items()
  )


def keys_per_query(model: model_lib.Config) -> float:
  """Returns the mean number of keys per query over positions, heads, layers."""
  return count_pairs(model) / (model.length * sum(map(len, model.patterns)))


def flops_per_token(model: model_lib.Config) -> dict[str, float]:
  """Returns the FLOPs that a training step needs per token.

  The number does not depend on how the step is executed. The backward pass
  counts twice as much as the forward pass, and recomputation is not counted.
  Attention is counted only for the query-key pairs in the patterns. Experts are
  counted only for the positions that are routed to them.
  Source: Chowdhery et al. 2022 (PaLM), appendix B.

  Returns:
    A dict of FLOPs: `weights` for matrix products with weights, `attention` for
    attention, and their `total`.
  """
  # In the forward pass, a pair takes two FLOPs per component of its query and
  # of its value. The backward pass takes twice as many.
  weights = 3 * _weight_flops(model)
  attention = 6 * sum(model.widths) * count_pairs(model) / model.length
  return dict(weights=weights, attention=attention, total=weights + attention)


def _weight_flops(model: model_lib.Config) -> int:
  """Returns the forward FLOPs per token of matrix products with weights."""
  products = model_lib.count_active_parameters(model, name="kernel")
  # The output layer of a classifier runs once per sequence, not per token.
  if model.classifies:
    products -= model.width * model.outputs
  return 2 * products


def speed(
  tokens_per_second: float, model: model_lib.Config
) -> dict[str, float]:
  """Returns the speed fields of a line of metrics.

  Args:
    tokens_per_second: the speed of all devices together; 0 if unknown.
    model: the config of the network.

  Returns:
    A dict of `tokens_per_second`, `model_flops_per_second` and, for devices in
    `PEAKS`, `mfu`, the model-FLOPs utilization as a fraction of their 16-bit
    peak. If the speed is unknown, the dict is empty.
  """
  if not tokens_per_second:
    return {}

  flops = tokens_per_second * flops_per_token(model)["total"]
  fields = dict(
    tokens_per_second=tokens_per_second, model_flops_per_second=flops
  )

  # For unknown devices, omit the utilization rather than guess the peak.
  devices = jax.devices()
  if peak := PEAKS.get(devices[0].device_kind):
    fields["mfu"] = flops / (peak * len(devices))
  return fields


def memory(config: schema.Config, model: model_lib.Config) -> dict[str, int]:
  """Returns the bytes of the training state and gradients on each device.

  Activations are not included, because their size is known only after
  compilation, see `Experiment.compile_step`.

  Returns:
    A dict of the bytes of `parameters`, `optimizer`, `average` and `gradients`,
    and their `total`.
  """
  state = abstract_state(config, model)
  sizes = mesh.sizes(config)
  weights = bytes_on_device(state.params, sizes)
  parts = dict(
    parameters=weights,
    optimizer=bytes_on_device(state.opt_state, sizes),
    average=bytes_on_device(state.ema, sizes),
    # With several micro-batches, the gradients of one and the sum of all.
    gradients=weights * min(config.train.accumulation, 2),
  )
  return parts | dict(total=sum(parts.values()))


def bytes_on_device(tree: Any, sizes: mesh.Sizes) -> int:
  """Returns the bytes on each device of a training state, or a part of it.

  Args:
    tree: a pytree of arrays, or of their shapes and dtypes.
    sizes: the number of devices along each axis of the mesh.
  """
  total = 0
  for path, x in jax.tree_util.tree_leaves_with_path(tree):
    # An array is split over some axes of the mesh and replicated over the
    # others.
    devices = math.prod(sizes[axis] for axis in spec(path, x) if axis)
    total += math.prod(x.shape) * x.dtype.itemsize // devices

  return total


def abstract_state(
  config: schema.Config, model: model_lib.Config
) -> step_lib.State:
  """Returns the shapes and dtypes of the training state of a network.

  This computes nothing and uses no device. Raises ValueError if the schedule of
  the learning rate is invalid.
  """
  optimizer = make_optimizer(config)
  return jax.eval_shape(
    lambda params: step_lib.init_state(params, optimizer, model.dtype),
    model_lib.param_shapes(model),
  )
