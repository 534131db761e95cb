"""The mesh of devices that a config describes, and checks of sizes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from sparse_transformer import model as model_lib, schema
from sparse_transformer.model.sharding import AXES, spec

Sizes = Mapping[str, int]  # the number of devices along each axis


def make(
  config: schema.Config, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Makes the mesh of an experiment.

  Splitting heads requires the most communication. Therefore, `tensor` is the
  last axis, because devices along the last axis are neighbors.

  Args:
    config: the config of the experiment.
    devices: the devices to use, or None for the devices of all processes.

  Raises ValueError if the axes do not fit the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  return jax.make_mesh(
    tuple(sizes(config, len(devices)).values()),
    AXES,
    # Let the compiler propagate shardings; JAX's default is explicit sharding.
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def split(mesh: Mesh, tree: Any) -> Any:
  """Describes how a training state is split over a mesh.

  Args:
    mesh: the mesh of devices.
    tree: a state or a part of it, as arrays or as their shapes and dtypes.

  Returns:
    A pytree of the same structure, whose leaves are `jax.ShapeDtypeStruct` with
    the shardings of `model.sharding.spec`.
  """

  def shard(path, x):
    like = jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)
    return like.update(sharding=NamedSharding(mesh, spec(path, like)))

  return jax.tree_util.tree_map_with_path(shard, tree)


def sizes(config: schema.Config, devices: int | None = None) -> Sizes:
  """Computes the number of devices along each axis of the mesh.

  Args:
    config: the config of the experiment. One axis of its mesh may be -1, which
      means all remaining devices.
    devices: the number of devices. If None, it is the product of the axes. If
      None and one axis is -1, it is the product of the other axes or the number
      of devices in this run, whichever is larger.

  Raises ValueError unless the product of the axes is `devices`.
  """
  axes = {axis: config.mesh[axis] for axis in AXES}

  # At most one axis can mean all remaining devices.
  words = " x ".join(f"mesh.{axis}={size}" for axis, size in axes.items())
  rest = [axis for axis, size in axes.items() if size == -1]
  if len(rest) > 1:
    raise ValueError(
      f"{words}: only one axis can be -1, which means all remaining devices"
    )

  # Unless an axis is -1, the mesh must use every device.
  asked = math.prod(size for size in axes.values() if size != -1)
  if devices is None:
    devices = max(asked, jax.device_count()) if rest else asked
  if devices % asked or (not rest and asked != devices):
    raise ValueError(
      f"{words} needs {'a multiple of ' if rest else ''}{asked} devices, but"
      f" there are {devices}; change an axis, or set one to -1, which means all"
      " remaining devices"
    )

  return axes | dict.fromkeys(rest, devices // asked)


def check_network(model: model_lib.Config, sizes: Sizes) -> None:
  """Raises ValueError if a network cannot be split over a mesh.

  The axis `sequence` splits positions, `fsdp` the width, and `tensor` heads.
  """
  for name, value, axis in (
    ("the length of a sequence", model.length, "sequence"),
    ("model.width", model.width, "fsdp"),
    ("model.num_heads", model.num_heads, "tensor"),
    ("model.key_heads", model.num_key_heads, "tensor"),
  ):
    if value % sizes[axis]:
      raise ValueError(
        f"{name}={value} must be a multiple of mesh.{axis}={sizes[axis]}"
      )


def check_batch(
  config: schema.Config, sizes: Sizes, group: str = "train"
) -> None:
  """Raises ValueError if a batch cannot be split evenly.

  Args:
    config: the config, which defines batch sizes and micro-batches.
    sizes: the number of devices along each axis of the mesh.
    group: the group whose `batch_size` is checked, "train" or "eval".
  """
  # Each micro-batch is split evenly along `data` and `fsdp`. Devices along
  # other axes process the same sequences.
  size = config[group].batch_size
  parts = num_shards(sizes)
  words = f"mesh.data={sizes['data']} x mesh.fsdp={sizes['fsdp']}"
  if group == "train":
    parts *= config.train.accumulation
    words += f" x train.accumulation={config.train.accumulation}"
  if size % parts:
    raise ValueError(f"{group}.batch_size={size} must be a multiple of {words}")


def num_shards(sizes: Sizes) -> int:
  """Returns the number of parts into which a batch is split."""
  return sizes["data"] * sizes["fsdp"]
