"""The arrays of a checkpoint, which Orbax writes into state/ and reads."""

import contextlib
import dataclasses
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from sparse_transformer.model import sharding
from sparse_transformer.training import loss_scale
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.step import State

FOLDER = "state"  # in the folder of a checkpoint


def start_writing(path: pathlib.Path, tree: Any) -> ocp.AsyncCheckpointer:
  """Starts to write arrays; `close` waits, and raises the error, if any.

  All processes write their shards. Arrays may be donated after the call: they
  are copied to the host first or, on CPUs, JAX keeps their memory for Orbax.
  """
  with contextlib.ExitStack() as stack:
    orbax = stack.enter_context(_orbax())
    orbax.save(path / FOLDER, args=ocp.args.StandardSave(tree))
    stack.pop_all()
    return orbax


def read(path: pathlib.Path, like: State) -> dict[str, Any]:
  """The arrays of a checkpoint with intact files, shaped and split as `like`.

  Raises:
    ValueError: it is from another network, or Orbax cannot read it.
  """
  expected = processes.together(lambda: _expected(path, like))
  with _reader(path) as orbax:
    args = ocp.args.StandardRestore(expected)
    found = orbax.restore(path / FOLDER, args=args)
    return jax.tree.map(jnp.asarray, found)


def read_weights(path: pathlib.Path, mesh: Mesh) -> dict[str, Any]:
  """{"ema": the averaged weights} of a checkpoint with intact files.

  Raises:
    ValueError: Orbax cannot read it.
  """
  with _reader(path) as orbax:
    found = orbax.metadata(path / FOLDER).item_metadata.tree
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype), found["ema"]
  )
  expected = {"ema": shapes}
  expected = jax.tree.map(
    lambda x, split: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
    expected,
    sharding.place(mesh, expected),
  )
  with _reader(path, ocp.PyTreeCheckpointHandler) as orbax:
    args = ocp.args.PyTreeRestore(
      expected,
      restore_args=ocp.checkpoint_utils.construct_restore_args(expected),
      partial_restore=True,
    )
    return orbax.restore(path / FOLDER, args=args)


def as_tree(state: State) -> dict[str, Any]:
  """Nested dicts, lists and arrays, which Orbax saves without our classes."""
  return {name: x for name, x in vars(state).items() if x is not None}


def first_line(error: Exception) -> str:
  """The beginning of a message, for one line."""
  return str(error).split("\n")[0][:200]


def _expected(path: pathlib.Path, like: State) -> dict[str, Any]:
  """The arrays to read from a checkpoint: shapes, dtypes and shardings."""
  with _reader(path) as orbax:
    found = orbax.metadata(path / FOLDER).item_metadata.tree
  # Evaluation may use another dtype than training, and no loss scale.
  scale = None
  if "loss_scale" in found:
    split = like.step.sharding
    scale = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
      jax.eval_shape(lambda: loss_scale.init("float16")),
    )
  tree = as_tree(dataclasses.replace(like, loss_scale=scale))
  saved, expected = (
    {(name, tuple(leaf.shape)) for name, leaf in by_name(x).items()}
    for x in (found, tree)
  )
  if differing := sorted({name for name, _ in saved ^ expected}):
    raise ValueError(
      f"checkpoint {path} is from another network: the shapes of"
      f" {', '.join(differing[:3])} differ; use the settings of the model, the"
      " centroids and the learned spans that it was trained with: those of"
      " config.json in its run"
    )
  return tree


def by_name(tree: Any) -> dict[str, Any]:
  """The leaves of a pytree by their paths, spelled as in Orbax."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


@contextlib.contextmanager
def _reader(
  path: pathlib.Path, handler: type = ocp.StandardCheckpointHandler
) -> Iterator[ocp.AsyncCheckpointer]:
  """Orbax; raises ValueError if it cannot read a checkpoint."""
  try:
    with _orbax(handler) as orbax:
      yield orbax
  except Exception as error:  # Orbax forwards what TensorStore raises
    raise ValueError(
      f"checkpoint {path} is complete, but cannot be restored:"
      f" {first_line(error)}"
    ) from error


def _orbax(
  handler: type = ocp.StandardCheckpointHandler,
) -> ocp.AsyncCheckpointer:
  """Reads and writes arrays; a context manager, in all processes."""
  # Orbax's default is to wait for others by a program on the devices, which
  # may be in the middle of a step.
  everyone = set(range(jax.process_count()))
  options = ocp.options.MultiprocessingOptions(
    active_processes=everyone if processes.are_several() else None
  )
  return ocp.AsyncCheckpointer(
    handler(multiprocessing_options=options), multiprocessing_options=options
  )


# Orbax logs the traceback of each error that it also raises.
logging.getLogger("absl").addFilter(
  lambda record: "/orbax/checkpoint/" not in record.pathname
)
