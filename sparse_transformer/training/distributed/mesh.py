"""The mesh of devices that a config describes, and checks against it."""

import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AxisType, Mesh
from ml_collections import ConfigDict

from sparse_transformer import model as model_lib
from sparse_transformer.model.sharding import AXES
from sparse_transformer.patterns import shorten

Sizes = Mapping[str, int]  # the devices along each axis


def make(
  config: ConfigDict, devices: Sequence[jax.Device] | None = None
) -> Mesh:
  """The mesh of an experiment on these devices; None for all, of all processes.

  Devices that are neighbors exchange the most, so `tensor` is the last axis.

  Raises:
    ValueError: the axes do not fit the devices.
  """
  devices = jax.devices() if devices is None else devices
  shape = tuple(sizes(config, len(devices)).values())
  # Auto: the compiler propagates shardings; JAX's default is explicit types.
  types = (AxisType.Auto,) * len(AXES)
  return jax.make_mesh(shape, AXES, types, devices=devices)


def sizes(config: ConfigDict, devices: int | None = None) -> Sizes:
  """The devices along each axis of the mesh.

  Args:
    config: the experiment's, whose group `mesh` may have one -1 for the rest.
    devices: how many there are; None for those that the config asks for, but
      at least those of this run.

  Raises:
    ValueError: the product of the sizes is not the number of devices.
  """
  given = {axis: config.mesh[axis] for axis in AXES}
  words = " x ".join(f"mesh.{axis}={size}" for axis, size in given.items())
  rest = [axis for axis, size in given.items() if size == -1]
  if len(rest) > 1:
    raise ValueError(f"{words}: only one axis can be -1, the devices left over")
  asked = math.prod(size for size in given.values() if size != -1)
  if devices is None:
    devices = max(asked, jax.device_count()) if rest else asked
  if asked > devices or devices % asked or (not rest and asked != devices):
    raise ValueError(
      f"{words} needs {'a multiple of ' if rest else ''}{asked} devices, but"
      f" there are {devices}; change an axis; -1 stands for the devices left"
      " over"
    )
  return given | dict.fromkeys(rest, devices // asked)


def check_network(model: model_lib.Config, sizes: Sizes) -> None:
  """Raises ValueError if a network cannot be split over a mesh."""
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
  _check_heads(model, sizes)


def check_batch(config: ConfigDict, sizes: Sizes, group: str = "train") -> None:
  """Raises ValueError unless devices and micro-batches divide a batch."""
  size, micro, words = config[group].batch_size, 1, ""
  if group == "train":
    micro = config.train.accumulation
    words = f" x train.accumulation={micro}"
  if size % (num_shards(sizes) * micro):
    raise ValueError(
      f"{group}.batch_size={size} must be a multiple of"
      f" mesh.data={sizes['data']} x mesh.fsdp={sizes['fsdp']}{words}"
    )


def num_shards(sizes: Sizes) -> int:
  """Number of parts that a batch is split into."""
  return sizes["data"] * sizes["fsdp"]


def _check_heads(model: model_lib.Config, sizes: Sizes) -> None:
  """Raises ValueError unless all devices have heads of the same patterns."""
  for layer, heads in enumerate(model.patterns):
    axes = ["tensor"]
    if any(pattern.contents() for pattern in heads):  # needs all positions
      axes.append("sequence")
    devices = math.prod(sizes[axis] for axis in axes)
    words = " x ".join(f"mesh.{axis}={sizes[axis]}" for axis in axes)
    if len(heads) % devices:
      raise ValueError(
        f"model.num_heads={len(heads)} must be a multiple of {words}, since"
        f" patterns of layer {layer} are content-based, and need all positions"
        " of a head on one device"
      )
    own = len(heads) // devices  # heads of a device
    if heads != heads[:own] * devices:
      other = next(h for h, x in enumerate(heads) if x != heads[h % own])
      raise ValueError(
        f"{words} gives each device {own} heads, which must have the same"
        f" patterns on all devices, but in layer {layer} head {other % own} has"
        f" {shorten(heads[other % own])}, and head {other}"
        f" {shorten(heads[other])}; use fewer devices along"
        f" {' and '.join(axes)}, or another attention.mode"
      )
