"""Attention on several devices: `jax.shard_map`, and mesh axes of any type.

On automatic axes, JAX's compiler divides the work. It cannot divide a kernel
unless it is told how, see `divide_batch`.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
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
  """Runs a kernel, each device on its own sequences.

  The compiler would run a kernel on whole arrays, and gather them first.

  Args:
    kernel: a function (tables, *arrays) to a tuple of arrays; the first axis of
      all arrays is the batch, and sequences do not depend on each other.
    tables: a pytree of arrays, which every device needs entirely.
    *arrays: arrays [B, ...].
  """
  leaves, structure = jax.tree.flatten(tables)
  count = len(leaves)

  def run(*inputs):
    tables = jax.tree.unflatten(structure, inputs[:count])
    return kernel(tables, *inputs[count:])

  def partition(mesh, inputs, results):
    batch_axis = (*inputs[count].sharding.spec, None)[0]
    whole = NamedSharding(mesh, PartitionSpec())
    divided = NamedSharding(mesh, PartitionSpec(batch_axis))
    of_inputs = *[whole] * count, *[divided] * len(arrays)
    return mesh, run, tuple(divided for _ in results), of_inputs

  divided = custom_partitioning(run)
  divided.def_partition(
    partition=partition,
    sharding_rule=_sharding_rule(
      leaves, arrays, jax.eval_shape(run, *leaves, *arrays)
    ),
  )

  @custom_vmap
  def mappable(*arrays):
    return divided(*leaves, *arrays)

  @mappable.def_vmap
  def _(size, is_mapped, *arrays):
    flat = [
      (x if mapped else jnp.broadcast_to(x, (size, *x.shape))).reshape(
        -1, *x.shape[1 + mapped :]
      )
      for x, mapped in zip(arrays, is_mapped, strict=True)
    ]
    results = divide_batch(kernel, tables, *flat)
    results = tuple(x.reshape(size, -1, *x.shape[1:]) for x in results)
    return results, tuple(True for _ in results)

  return mappable(*arrays)


def _sharding_rule(tables, arrays, results):
  """The rule of `divide_batch`: only the batch is common to all arrays."""
  names = (f"f{i}" for i in itertools.count())

  def axes(x, *first):
    return " ".join([*first, *itertools.islice(names, x.ndim - len(first))])

  inputs = *map(axes, tables), *(axes(x, "batch") for x in arrays)
  outputs = (axes(x, "batch") for x in results)
  return f"{', '.join(inputs)} -> {', '.join(outputs)}"
