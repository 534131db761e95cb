"""Attention on several devices: `jax.shard_map`, and mesh axes of any type.

On automatic axes, JAX's compiler divides the work of executors in plain JAX;
kernels use `divide_batch`, which needs the mesh in context (`jax.set_mesh`).
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

Results = tuple[jax.Array, jax.Array]


def on_any_mesh(
  attention: Callable[..., Results],
  q_BLHK: jax.Array,
  k_BMHK: jax.Array,
  v_BMHE: jax.Array,
  *tables: Any,
) -> Results:
  """Runs attention on one device, within `jax.shard_map`, or on any mesh.

  Args:
    attention: a function (q_BLHK, k_BMHK, v_BMHE, *tables) of arrays, to
      (out_BLHE, lse_BLH).
    q_BLHK, k_BMHK, v_BMHE, *tables: its arguments.

  Returns:
    (out_BLHE, lse_BLH); on explicit axes, sharded over B, L and H as the
    queries are.
  """
  inputs = q_BLHK, k_BMHK, v_BMHE, *tables
  queries = jax.typeof(q_BLHK).sharding
  meshes = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(inputs))
  mesh = next((mesh for mesh in meshes if mesh.explicit_axes), None)
  if mesh is not None:
    # Loops over tiles have no single sharding: leave it to the compiler.
    attention = jax.sharding.auto_axes(
      attention,
      axes=mesh.explicit_axes,
      out_sharding=NamedSharding(mesh, PartitionSpec(*queries.spec[:3])),
    )
  return attention(*_varying_alike(inputs))


def _varying_alike(inputs: Any) -> Any:
  """Makes all arrays vary over the mesh axes that any of them varies over.

  Within `jax.shard_map`, the carry of a loop must vary over all axes of what
  is added to it, and a gradient over those of its input.
  """

  def axes(x):
    return jax.typeof(x).manual_axis_type.varying

  union = frozenset().union(*map(axes, jax.tree.leaves(inputs)))
  return jax.tree.map(
    lambda x: lax.pcast(x, tuple(union - axes(x)), to="varying"), inputs
  )


def divide_batch(
  kernel: Callable[..., tuple[jax.Array, ...]], tables: Any, *arrays: jax.Array
) -> Any:
  """Runs a kernel, each device of the mesh in context on its own sequences.

  Along axes that do not divide the batch, all devices run the same.

  On automatic axes, the compiler cannot divide a kernel: it would gather its
  arguments, and run it on all of them on every device.

  Args:
    kernel: a function (tables, *arrays) to a tuple of arrays; the first axis of
      all arrays is the batch, and sequences do not depend on each other.
    tables: a pytree of arrays, which every device needs entirely.
    *arrays: arrays [B, ...].
  """
  mesh = jax.sharding.get_abstract_mesh()
  axes: list[str] = []
  for axis in mesh.auto_axes:
    size = math.prod(mesh.shape[a] for a in [*axes, axis])
    if size > 1 and len(arrays[0]) % size == 0:
      axes.append(axis)
  if mesh.empty or mesh.size == 1 or not mesh.auto_axes:
    return kernel(tables, *arrays)
  divided = PartitionSpec(tuple(axes))
  return jax.shard_map(
    kernel,
    in_specs=(PartitionSpec(), *[divided] * len(arrays)),
    out_specs=divided,
    axis_names={*mesh.auto_axes},
    # Pallas' interpreter, which reads arrays that vary over devices at indices
    # that do not, fails this check. Compiled kernels pass it.
    check_vma=False,
  )(jax.tree.map(jnp.asarray, tables), *arrays)
