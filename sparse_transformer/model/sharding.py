"""The rules for splitting arrays over a mesh of devices, all in this file.

`data` and `fsdp` split sequences, and `fsdp` also weights and what the
optimizer keeps for them. `sequence` splits positions, `tensor` heads and the
inner widths of MLPs and of all experts. Vectors and embeddings are whole on
every device: embeddings split by width make the compiler move activations.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

AXES = "data", "fsdp", "sequence", "tensor"
SEQUENCES = "data", "fsdp"  # the axes that split a batch

# The layers whose inputs or outputs are the residual stream, by their names.
READERS = {"query", "key", "value", "mlp_in", "experts_in"}
WRITERS = {"out", "mlp_out", "experts_out"}


def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
  """Returns the split of an array of the training state.

  Moments and averages have the path of their parameter, after other names. Axes
  along which parameters are stacked stay whole. A matrix whose layer is neither
  in `READERS` nor in `WRITERS` is whole on every device: name new layers there.

  Args:
    path: of `jax.tree_util`.
    x: the array.
  """
  # Vectors, embeddings and scalars are whole on every device.
  names = [getattr(key, "key", None) for key in path]
  if names[-1:] != ["kernel"]:
    return PartitionSpec()

  # `fsdp` splits the width of the stream, and `tensor` the other one.
  stacked = [None] * (x.ndim - 2)
  if not READERS.isdisjoint(names):
    return PartitionSpec(*stacked, "fsdp", "tensor")
  if not WRITERS.isdisjoint(names):
    return PartitionSpec(*stacked, "tensor", "fsdp")
  return PartitionSpec()


def split_stream(x_BLD: jax.Array) -> jax.Array:
  """Splits the residual stream: the compiler would sum it over `fsdp`."""
  return _constrain(x_BLD, positions(*x_BLD.shape[:2]))


def keep_whole(x: jax.Array) -> jax.Array:
  """Keeps a vector whole on every device; else the compiler may split it."""
  return _constrain(x, PartitionSpec())


def positions(batch: int, length: int) -> PartitionSpec:
  """Returns the split of an array [B, L, ...] over the mesh in context.

  Axes that do not divide B or L, as when sampling, do not split it.
  """
  # Each device must get as many sequences, and as many positions of them.
  splits_batch = batch % size(SEQUENCES) == 0
  splits_length = length % size(["sequence"]) == 0
  return PartitionSpec(
    SEQUENCES if splits_batch else None,
    "sequence" if splits_length else None,
  )


def heads(batch: int, length: int) -> PartitionSpec | None:
  """Returns the split of queries, keys and values [B, L, H, ...], if any."""
  if size(AXES) == 1:
    return None
  return PartitionSpec(*positions(batch, length), "tensor")


def size(axes: Sequence[str]) -> int:
  """Counts devices along axes of the mesh in context; 1 without them."""
  # Within a `shard_map`, axes are no longer the compiler's to split.
  mesh = jax.sharding.get_abstract_mesh()
  sizes = [mesh.shape[axis] for axis in axes if axis in mesh.auto_axes]
  return math.prod(sizes)


def _constrain(x, spec):
  # A constraint needs a mesh in context.
  if size(AXES) == 1:
    return x
  return lax.with_sharding_constraint(x, spec)
