"""Attention on several devices: `jax.shard_map`, and explicit mesh axes.

On automatic axes, JAX's compiler divides the work, and nothing is needed here.
"""

from collections.abc import Callable
from typing import Any

import jax
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
