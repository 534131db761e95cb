"""The mesh of devices that a config describes, and checks against it."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding

from sparse_transformer import model as model_lib, schema
from sparse_transformer.model.sharding import AXES, spec

Sizes = Mapping[str, int]  # the devices along each axis


def make(
  config: schema.Config, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """Makes the mesh of an experiment.

  Heads that are split exchange the most, so `tensor` is the last axis, along
  which devices are neighbors.

  Args:
    config: the experiment's.
    devices: the devices to use; None for those of all processes.

  Raises ValueError if the axes do not fit the devices.
  """
  devices = jax.devices() if devices is None else devices
  return jax.make_mesh(
    tuple(sizes(config, len(devices)).values()),
    AXES,
    # The compiler propagates shardings; JAX's default is explicit types.
    axis_types=(AxisType.Auto,) * len(AXES),
    devices=devices,
  )


def split(mesh: Mesh, tree: Any) -> Any:
  """Describes how a training state is split over a mesh.

  Args:
    mesh: the devices.
    tree: a state, or a part of one: arrays, or their shapes and dtypes.

  Returns the same tree of `jax.ShapeDtypeStruct`, each with its sharding from
  `model.sharding.spec`.
  """

  def shard(path, x):
    like = jax.ShapeDtypeStruct(tuple(x.shape), x.dtype)
    return like.update(sharding=NamedSharding(mesh, spec(path, like)))

  return jax.tree_util.tree_map_with_path(shard, tree)


def sizes(config: schema.Config, devices: int | None = None) -> Sizes:
  """Computes how many devices lie along each axis of the mesh.

  Args:
    config: the experiment's, where one axis may be -1, which gets what the
      others leave.
    devices: how many devices there are. None for as many as the axes ask for,
      or, if one is -1, for those of this run, if they are more.

  Raises ValueError unless the product of the axes is `devices`.
  """
  axes = {axis: config.mesh[axis] for axis in AXES}

  # At most one axis takes what the others leave.
  words = " x ".join(f"mesh.{axis}={size}" for axis, size in axes.items())
  rest = [axis for axis, size in axes.items() if size == -1]
  if len(rest) > 1:
    raise ValueError(f"{words}: only one axis can be -1, the devices left over")

  # Without a rest, each device must have a place in the mesh.
  asked = math.prod(size for size in axes.values() if size != -1)
  if devices is None:
    devices = max(asked, jax.device_count()) if rest else asked
  if devices % asked or (not rest and asked != devices):
    raise ValueError(
      f"{words} needs {'a multiple of ' if rest else ''}{asked} devices, but"
      f" there are {devices}; change an axis; -1 stands for the devices left"
      " over"
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
  """Raises ValueError unless devices and micro-batches divide a batch.

  Args:
    config: has the size of the batch.
    sizes: the devices along each axis of the mesh.
    group: "train" or "eval", whose `batch_size` it is.
  """
  # All devices have equally many sequences of each micro-batch. Devices along
  # the other axes work on the same sequences.
  size = config[group].batch_size
  parts = num_shards(sizes)
  words = f"mesh.data={sizes['data']} x mesh.fsdp={sizes['fsdp']}"
  if group == "train":
    parts *= config.train.accumulation
    words += f" x train.accumulation={config.train.accumulation}"
  if size % parts:
    raise ValueError(f"{group}.batch_size={size} must be a multiple of {words}")


def num_shards(sizes: Sizes) -> int:
  """The number of parts into which a batch is split."""
  return sizes["data"] * sizes["fsdp"]
