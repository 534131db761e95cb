"""Attention on several devices, by `jax.shard_map` on any mesh."""

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
    q_BLHK: the queries. Their type may name a mesh; otherwise, the mesh in
      context is used.
    spec: the mesh axes of sequences, positions and heads, as in `attend`; None
      for the default.

  Raises:
    ValueError: the spec does not fit the mesh, or does not split the array
      evenly.
  """
  mesh = _mesh_of(q_BLHK)
  if spec is None:
    return _default_split(q_BLHK, mesh)

  is_spec = isinstance(spec, PartitionSpec | tuple) and len(spec) <= 3
  if not is_spec or {a for x in spec for a in _axes(x)} - set(mesh.axis_names):
    raise ValueError(
      f"{spec=} must say which axes split sequences, positions and heads, of"
      f" the mesh with axes {mesh.axis_names}; set a mesh by `jax.set_mesh`"
    )

  asked = _split_by(spec, mesh)
  # The manual axes of an enclosing `jax.shard_map` have already split the
  # arrays.
  outside = set(mesh.manual_axes)
  split = Split(
    sequences=_without(asked.sequences, outside),
    positions=_without(asked.positions, outside),
    heads=_without(asked.heads, outside),
    within=tuple(axis for axis in asked.positions if axis in outside),
  )
  if split.within and split.positions:
    raise ValueError(
      f"{spec=}: either all or none of the axes of positions must be manual"
    )

  # `zip` ends after the three axes of the array, so `within` is not checked.
  whole = zip(q_BLHK.shape[:3], split, Split._fields, strict=False)
  for size, axes, name in whole:
    if size % _size(mesh, axes):
      raise ValueError(
        f"{size} {name} cannot be split over {_size(mesh, axes)} devices"
        f" (mesh axes {', '.join(axes)}); the number of {name} must be a"
        f" multiple of {_size(mesh, axes)}"
      )
  return split


def _default_split(q_BLHK, mesh):
  """Returns the split if no spec is given.

  Explicit axes split arrays as in the sharding of the queries' type. How
  automatic axes split arrays is not known during tracing, so they are assumed
  to split sequences if they divide the batch evenly.
  """
  split = _split_by(jax.typeof(q_BLHK).sharding.spec, mesh)
  sequences = split.sequences
  for axis in mesh.auto_axes:
    size = _size(mesh, (*sequences, axis))
    if mesh.shape[axis] > 1 and q_BLHK.shape[0] % size == 0:
      sequences = (*sequences, axis)
  return split._replace(sequences=sequences)


def _split_by(spec, mesh):
  """Converts a spec of queries to a `Split`, without mesh axes of size 1."""
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
  """Returns the abstract mesh of an array, or the mesh in context."""
  mesh = jax.typeof(x).sharding.mesh
  return mesh if mesh.explicit_axes else jax.sharding.get_abstract_mesh()


def num_devices(x: jax.Array, axes: Axes) -> int:
  """Returns the number of devices along mesh axes."""
  return _size(_mesh_of(x), axes)


def on_any_mesh(
  attention: Callable[..., Results],
  split: Split,
  arrays: tuple[jax.Array, ...],
  rest: Any,
  specs: Any,
) -> Results:
  """Runs attention on one device, or by `jax.shard_map` on a mesh.

  Args:
    attention: a function (arrays, rest) of the shards of one device.
    split, arrays: how arrays are split, and the arrays [B, L, H, ...]. On
      explicit axes, results are split like the first array.
    rest, specs: a pytree of other arrays, and their specs, as a prefix of this
      pytree.

  Returns:
    (out_BLHE, lse_BLH) of all devices, split as `split` says.
  """
  # A single device needs no `shard_map`. Within a `shard_map` over all axes,
  # the arrays are already the shards of one device.
  mesh = _mesh_of(arrays[0])
  free = mesh.auto_axes + mesh.explicit_axes
  if not mesh.explicit_axes and _size(mesh, free) == 1:
    arrays, rest = _varying_alike((arrays, rest))
    return attention(arrays, rest)

  # Axes of a single device are added to the spec, because gradients are summed
  # over the devices along axes that are not in a spec, even along those with a
  # single device.
  named = split.sequences + split.positions + split.heads
  single = [axis for axis in mesh.auto_axes if mesh.shape[axis] == 1]
  sequences = split.sequences + _without(single, named)
  spec = split._replace(sequences=sequences).spec

  query_spec = jax.typeof(arrays[0]).sharding.spec
  in_specs = spec, specs
  # Along explicit axes, arrays must be split by the specs before the call.
  # Along automatic axes, the compiler does this.
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
    # The check would fail, because loops start from arrays that do not vary
    # over devices, and interpreted kernels do not declare how their results
    # vary.
    check_vma=False,
  )(arrays, rest)

  # Results get the sharding of the caller's queries.
  if mesh.explicit_axes:
    results = _reshard(mesh, results, PartitionSpec(*query_spec[:3]))
  return results


def _reshard(mesh, inputs, specs):
  """Reshards inputs along explicit axes, as `jax.shard_map` requires."""
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
  # The carry of a loop and the values added to it must vary over the same axes.
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
