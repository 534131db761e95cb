"""Attention on several devices: within `jax.shard_map`, on any mesh."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from sparse_transformer.attention.contract import Axes

Results = tuple[jax.Array, jax.Array]


class Split(NamedTuple):
  """The axes of the mesh that split arrays [B, L, H, ...]."""

  sequences: Axes = ()
  positions: Axes = ()
  heads: Axes = ()
  # Those that have divided positions, if the caller is within `jax.shard_map`.
  within: Axes = ()

  @property
  def over_positions(self) -> Axes:
    """The axes that divide positions, here or around the caller."""
    return self.within or self.positions

  @property
  def spec(self) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in self[:3]))


def split_of(q_BLHK: jax.Array, spec: PartitionSpec | None) -> Split:
  """The split of queries over the mesh in context, by a spec as in `attend`."""
  mesh = _mesh_of(q_BLHK)

  def entries_of(spec):
    several = [tuple(a for a in _axes(x) if mesh.shape[a] > 1) for x in spec]
    return several + [()] * (3 - len(several))

  if spec is None:
    sequences, *others = entries_of(jax.typeof(q_BLHK).sharding.spec[:3])
    for axis in mesh.auto_axes:  # those that divide the batch
      size = _size(mesh, (*sequences, axis))
      if mesh.shape[axis] > 1 and q_BLHK.shape[0] % size == 0:
        sequences = (*sequences, axis)
    return Split(sequences, *others)
  is_spec = isinstance(spec, PartitionSpec | tuple) and len(spec) <= 3
  if not is_spec or {a for x in spec for a in _axes(x)} - {*mesh.axis_names}:
    raise ValueError(
      f"{spec=} must say which axes split sequences, positions and heads, of a"
      f" mesh with axes {mesh.axis_names}; see `jax.set_mesh`"
    )
  manual = {*mesh.manual_axes}
  entries = entries_of(spec)
  within = tuple(a for a in entries[1] if a in manual)
  rest = [tuple(a for a in axes if a not in manual) for axes in entries]
  if within and rest[1]:
    raise ValueError(f"{spec=}: only some axes of positions are manual")
  for size, axes, name in zip(q_BLHK.shape, rest, Split._fields, strict=False):
    if size % _size(mesh, axes):
      raise ValueError(
        f"{size} {name} cannot be split over {_size(mesh, axes)} devices"
        f" ({', '.join(axes)}); they must be a multiple"
      )
  return Split(*rest)._replace(within=within)


def _mesh_of(x):
  """The abstract mesh that an array is on, or the one in context."""
  mesh = jax.typeof(x).sharding.mesh
  return mesh if mesh.explicit_axes else jax.sharding.get_abstract_mesh()


def num_devices(x: jax.Array, axes: Axes) -> int:
  """Number of devices along axes of the mesh."""
  return _size(_mesh_of(x), axes)


def on_any_mesh(
  attention: Callable[..., Results],
  split: Split,
  arrays: Sequence[jax.Array],
  others: Any,
  specs: Any,
) -> Results:
  """Runs attention on one device, within `jax.shard_map`, or on any mesh.

  Args:
    attention: a function (*arrays, others) of what a device has.
    split, arrays: arrays [B, L, H, ...], and how they are split. On explicit
      axes, results are split as the first.
    others, specs: a pytree of other arrays, and of their specs, its prefix.
  """
  mesh = _mesh_of(arrays[0])
  free = {*mesh.auto_axes, *mesh.explicit_axes}
  if not mesh.explicit_axes and _size(mesh, tuple(free)) == 1:
    return attention(*_varying_alike((*arrays, others)))
  # Gradients are summed over the devices along axes that are not in a spec,
  # even over a single one.
  named = {axis for entry in split.spec for axis in _axes(entry)}
  ones = (a for a in mesh.auto_axes if mesh.shape[a] == 1 and a not in named)
  split = split._replace(sequences=(*split.sequences, *ones))
  inputs, in_specs = (*arrays, others), (*[split.spec] * len(arrays), specs)
  if mesh.explicit_axes:
    inputs = _reshard(mesh, inputs, in_specs)
  in_context = not jax.sharding.get_abstract_mesh().empty
  results = jax.shard_map(
    attention,
    mesh=None if in_context else mesh,
    in_specs=in_specs,
    out_specs=split.spec,
    axis_names=free,
    # Loops start from arrays that do not vary over devices, and interpreted
    # kernels do not say how their results vary.
    check_vma=False,
  )(*jax.tree.map(jnp.asarray, inputs))
  if mesh.explicit_axes:
    queries = PartitionSpec(*jax.typeof(arrays[0]).sharding.spec[:3])
    results = _reshard(mesh, results, queries)
  return results


def _reshard(mesh, inputs, specs):
  """Inputs whose types match what `jax.shard_map` is told."""
  explicit = {*mesh.explicit_axes}

  def reshard(spec, tree):
    axes = (tuple(a for a in _axes(x) if a in explicit) for x in spec)
    spec = PartitionSpec(*(x or None for x in axes))
    on = jax.sharding.NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.sharding.reshard(x, on), tree)

  return jax.tree.map(
    reshard, specs, inputs, is_leaf=lambda x: isinstance(x, PartitionSpec)
  )


def _varying_alike(inputs):
  """Makes all arrays vary over the mesh axes that any of them varies over."""
  # As the carry of a loop and what is added to it must.
  axes = lambda x: jax.typeof(x).manual_axis_type.varying
  union = frozenset().union(*map(axes, jax.tree.leaves(inputs)))
  return jax.tree.map(
    lambda x: lax.pcast(x, tuple(union - axes(x)), to="varying"), inputs
  )


def _axes(entry):
  return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(mesh, axes):
  return math.prod(mesh.shape[axis] for axis in axes)
