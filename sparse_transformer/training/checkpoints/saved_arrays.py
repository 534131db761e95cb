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

from sparse_transformer.training import loss_scale
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.step import State

FOLDER = "state"  # in the folder of a checkpoint


def start_writing(path: pathlib.Path, tree: Any) -> ocp.AsyncCheckpointer:
  """Starts to write arrays, from `as_tree`, into the folder of a checkpoint.

  All processes write their shards. Arrays may be donated after the call: on
  accelerators they are copied to the host first, and JAX does not reuse the
  memory of those on CPUs while Orbax refers to it.

  Returns:
    Its `close` waits, and raises the error of the save, if any.
  """
  with contextlib.ExitStack() as stack:
    orbax = stack.enter_context(_orbax())
    orbax.save(path / FOLDER, args=ocp.args.StandardSave(tree))
    stack.pop_all()
    return orbax


def read(path: pathlib.Path, like: State) -> dict[str, Any]:
  """The arrays of a checkpoint whose files have been verified.

  Args:
    path: the folder of the checkpoint.
    like: the shapes of the state, and their shardings.

  Raises:
    ValueError: it is from another network, or Orbax cannot read it.
  """
  expected = processes.together(lambda: _expected(path, like))
  with _readable(path), _orbax() as orbax:
    args = ocp.args.StandardRestore(expected)
    found = orbax.restore(path / FOLDER, args=args)
    return jax.tree.map(jnp.asarray, found)


def as_tree(state: State) -> dict[str, Any]:
  """Nested dicts, lists and arrays, which Orbax saves without our classes."""
  fields = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
  return {name: x for name, x in fields.items() if x is not None}


def first_line(error: Exception) -> str:
  """The beginning of a message, for one line."""
  return str(error).split("\n")[0][:200]


def _expected(path: pathlib.Path, like: State) -> dict[str, Any]:
  """The arrays to read from a checkpoint: shapes, dtypes and shardings."""
  with _readable(path), _orbax() as orbax:
    metadata = orbax.metadata(path / FOLDER).item_metadata
  tree = as_tree(like)
  # Evaluation may use another dtype than training, and no loss scale.
  if "loss_scale" in metadata.tree:
    split = like.step.sharding
    tree["loss_scale"] = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split),
      jax.eval_shape(lambda: loss_scale.init("float16")),
    )
  else:
    tree.pop("loss_scale", None)
  saved, expected = _shapes(metadata.tree), _shapes(tree)
  names = sorted(saved.keys() | expected.keys())
  if differing := [n for n in names if saved.get(n) != expected.get(n)]:
    raise ValueError(
      f"checkpoint {path} is from another network: the shapes of"
      f" {', '.join(differing[:3])} differ; omit overrides of the model, and"
      " use patterns with the centroids and learned spans that it was trained"
      " with"
    )
  return tree


@contextlib.contextmanager
def _readable(path: pathlib.Path) -> Iterator[None]:
  """Raises ValueError if Orbax cannot read a checkpoint."""
  try:
    yield
  except Exception as error:  # Orbax forwards what TensorStore raises
    raise ValueError(
      f"checkpoint {path} is complete, but cannot be restored:"
      f" {first_line(error)}"
    ) from error


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """The shape of each array by its path, spelled as in Orbax."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _orbax() -> ocp.AsyncCheckpointer:
  """Reads and writes arrays; a context manager, in all processes."""
  # Orbax's default is to wait for others by a program on the devices, which
  # may be in the middle of a step.
  everyone = set(range(jax.process_count()))
  options = ocp.options.MultiprocessingOptions(
    active_processes=everyone if processes.are_several() else None
  )
  handler = ocp.StandardCheckpointHandler(multiprocessing_options=options)
  return ocp.AsyncCheckpointer(handler, multiprocessing_options=options)


# Orbax logs the traceback of each error that it also raises.
logging.getLogger("absl").addFilter(
  lambda record: "/orbax/checkpoint/" not in record.pathname
)
