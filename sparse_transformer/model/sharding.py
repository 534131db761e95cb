"""All rules for splitting arrays over a mesh of devices.

The axes `data` and `fsdp` split the batch; `fsdp` also splits weight matrices
and their optimizer state. The axis `sequence` splits positions. The axis
`tensor` splits heads and the inner widths of MLPs and of all experts. Vectors
and embeddings are replicated on every device, because splitting embeddings by
width would make the compiler move activations.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

AXES = "data", "fsdp", "sequence", "tensor"
SEQUENCES = "data", "fsdp"  # the axes that split a batch

# The names of layers whose inputs, or whose outputs, are the residual stream.
READERS = {"query", "key", "value", "mlp_in", "experts_in"}
WRITERS = {"out", "mlp_out", "experts_out"}


def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
  """Returns the `PartitionSpec` of an array of the training state.

  The paths of a parameter's moments and averages end with the path of the
  parameter, so these arrays are split like the parameter. Axes along which
  parameters are stacked are not split. A matrix is replicated on every device
  unless its layer is in `READERS` or `WRITERS`, so new layers must be added
  there.

  Args:
    path: the path of the array, from `jax.tree_util`.
    x: the array.
  """
  # Vectors, embeddings and scalars are replicated on every device.
  names = [getattr(key, "key", None) for key in path]
  if names[-1:] != ["kernel"]:
    return PartitionSpec()

  # `fsdp` splits the width of the stream, and `tensor` splits the other width.
  stacked = [None] * (x.ndim - 2)
  if not READERS.isdisjoint(names):
    return PartitionSpec(*stacked, "fsdp", "tensor")
  if not WRITERS.isdisjoint(names):
    return PartitionSpec(*stacked, "tensor", "fsdp")
  return PartitionSpec()


def split_stream(x_BLD: jax.Array) -> jax.Array:
  """Splits the residual stream like the batch.

  Without this constraint, the compiler would sum the stream over `fsdp`.
  """
  return _constrain(x_BLD, positions(*x_BLD.shape[:2]))


def keep_whole(x: jax.Array) -> jax.Array:
  """Replicates a vector on all devices, so that it is not split."""
  return _constrain(x, PartitionSpec())


def positions(batch: int, length: int) -> PartitionSpec:
  """Returns the `PartitionSpec` of an array [B, L, ...] on the current mesh.

  A mesh axis splits the array only if all devices get equal parts. In sampling,
  this may be impossible.
  """
  # All devices must get equal numbers of sequences and of positions.
  splits_batch = batch % size(SEQUENCES) == 0
  splits_length = length % size(["sequence"]) == 0
  return PartitionSpec(
    SEQUENCES if splits_batch else None,
    "sequence" if splits_length else None,
  )


def heads(batch: int, length: int) -> PartitionSpec | None:
  """Returns the spec of q, k and v [B, L, H, ...], or None on one device."""
  if size(AXES) == 1:
    return None
  return PartitionSpec(*positions(batch, length), "tensor")


def size(axes: Sequence[str]) -> int:
  """Counts the devices along axes of the mesh in context; 1 without a mesh."""
  # Within a `shard_map`, axes are manual, and are not counted.
  mesh = jax.sharding.get_abstract_mesh()
  sizes = [mesh.shape[axis] for axis in axes if axis in mesh.auto_axes]
  return math.prod(sizes)


def _constrain(x, spec):
  # A constraint needs a mesh in context.
  if size(AXES) == 1:
    return x
  return lax.with_sharding_constraint(x, spec)
