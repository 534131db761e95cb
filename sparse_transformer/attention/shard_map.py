"""Attention on several devices: within `jax.shard_map`, on any mesh."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from sparse_transformer.attention.contract import Axes, Split

Results = tuple[jax.Array, jax.Array]


def split_of(q_BLHK: jax.Array, spec: PartitionSpec | None) -> Split:
  """Finds how queries are split over the mesh.

  Args:
    q_BLHK: the queries, whose type may have a mesh; otherwise that in context.
    spec: the axes of sequences, positions and heads, as in `attend`; None for
      the default.

  Raises:
    ValueError: the spec is not one of this mesh, or does not divide the array.
  """
  mesh = _mesh_of(q_BLHK)
  if spec is None:
    return _default_split(q_BLHK, mesh)

  is_spec = isinstance(spec, PartitionSpec | tuple) and len(spec) <= 3
  if not is_spec or {a for x in spec for a in _axes(x)} - set(mesh.axis_names):
    raise ValueError(
      f"{spec=} must say which axes split sequences, positions and heads, of a"
      f" mesh with axes {mesh.axis_names}; see `jax.set_mesh`"
    )

  asked = _split_by(spec, mesh)
  # The axes of an enclosing `jax.shard_map` have already split the arrays.
  outside = set(mesh.manual_axes)
  split = Split(
    sequences=_without(asked.sequences, outside),
    positions=_without(asked.positions, outside),
    heads=_without(asked.heads, outside),
    within=tuple(axis for axis in asked.positions if axis in outside),
  )
  if split.within and split.positions:
    raise ValueError(f"{spec=}: only some axes of positions are manual")

  # `within` is beyond the three axes of the array, and not checked.
  whole = zip(q_BLHK.shape[:3], split, Split._fields, strict=False)
  for size, axes, name in whole:
    if size % _size(mesh, axes):
      raise ValueError(
        f"{size} {name} cannot be split over {_size(mesh, axes)} devices"
        f" ({', '.join(axes)}); they must be a multiple"
      )
  return split


def _default_split(q_BLHK, mesh):
  """The split without a spec.

  Explicit axes split as the type of the queries says. Automatic axes, whose
  split is not known while tracing, split sequences if they divide them.
  """
  split = _split_by(jax.typeof(q_BLHK).sharding.spec, mesh)
  sequences = split.sequences
  for axis in mesh.auto_axes:
    size = _size(mesh, (*sequences, axis))
    if mesh.shape[axis] > 1 and q_BLHK.shape[0] % size == 0:
      sequences = (*sequences, axis)
  return split._replace(sequences=sequences)


def _split_by(spec, mesh):
  """The split by a spec of queries, without axes of a single device."""
  single = {axis for axis in mesh.axis_names if mesh.shape[axis] == 1}
  axes = [_without(_axes(entry), single) for entry in spec[:3]]
  # A spec may be shorter than the axes of the array.
  sequences, positions, heads = axes + [()] * (3 - len(axes))
  return Split(
    sequences=sequences,
    positions=positions,
    heads=heads,
  )


def _without(axes, omitted):
  return tuple(axis for axis in axes if axis not in omitted)


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
  arrays: tuple[jax.Array, ...],
  rest: Any,
  specs: Any,
) -> Results:
  """Runs attention on one device, within `jax.shard_map`, or on any mesh.

  Args:
    attention: a function (arrays, rest) of what a device has.
    split, arrays: arrays [B, L, H, ...], and how they are split. On explicit
      axes, results are split as the first.
    rest, specs: a pytree of other arrays, and of their specs, its prefix.

  Returns:
    (out_BLHE, lse_BLH) of all devices, split as `split` says.
  """
  # One device needs no `shard_map`; within one, its arrays are all there are.
  mesh = _mesh_of(arrays[0])
  free = mesh.auto_axes + mesh.explicit_axes
  if not mesh.explicit_axes and _size(mesh, free) == 1:
    arrays, rest = _varying_alike((arrays, rest))
    return attention(arrays, rest)

  # Gradients are summed over the devices along axes that are not in a spec,
  # even over a single one.
  named = split.sequences + split.positions + split.heads
  single = [axis for axis in mesh.auto_axes if mesh.shape[axis] == 1]
  sequences = split.sequences + _without(single, named)
  spec = split._replace(sequences=sequences).spec

  query_spec = jax.typeof(arrays[0]).sharding.spec
  in_specs = spec, specs
  # Explicit axes must be split as the specs say before the call; automatic ones
  # are by the compiler.
  if mesh.explicit_axes:
    arrays, rest = _reshard(mesh, (arrays, rest), in_specs)
  arrays, rest = jax.tree.map(jnp.asarray, (arrays, rest))
  in_context = not jax.sharding.get_abstract_mesh().empty
  results = jax.shard_map(
    attention,
    mesh=None if in_context else mesh,
    in_specs=in_specs,
    out_specs=spec,
    axis_names=set(free),
    # Loops start from arrays that do not vary over devices, and interpreted
    # kernels do not say how their results vary.
    check_vma=False,
  )(arrays, rest)

  # Results get the type that the caller's queries had.
  if mesh.explicit_axes:
    results = _reshard(mesh, results, PartitionSpec(*query_spec[:3]))
  return results


def _reshard(mesh, inputs, specs):
  """Inputs whose types match what `jax.shard_map` is told."""
  implicit = set(mesh.axis_names) - set(mesh.explicit_axes)

  def reshard(spec, tree):
    explicit = [_without(_axes(entry), implicit) for entry in spec]
    spec = PartitionSpec(*(axes or None for axes in explicit))
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: jax.sharding.reshard(x, sharding), tree)

  return jax.tree.map(
    reshard,
    specs,
    inputs,
    is_leaf=lambda x: isinstance(x, PartitionSpec),
  )


def _varying_alike(inputs):
  """Makes all arrays vary over the mesh axes that any of them varies over."""
  # As the carry of a loop and what is added to it must.
  axes_of = lambda x: jax.typeof(x).manual_axis_type.varying
  leaves = jax.tree.leaves(inputs)
  union = {axis for x in leaves for axis in axes_of(x)}

  def cast(x):
    missing = tuple(union - axes_of(x))
    return lax.pcast(x, missing, to="varying")

  return jax.tree.map(cast, inputs)


def _axes(entry):
  return (entry,) if isinstance(entry, str) else tuple(entry or ())


def _size(mesh, axes):
  return math.prod(mesh.shape[axis] for axis in axes)
