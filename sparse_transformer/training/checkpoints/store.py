"""Saves, verifies and restores the checkpoints of a run.

A checkpoint is the folder `checkpoints/<step>/` of a workdir:

  state/      the arrays of the training state
  about/      the config, versions, data checksum and validation loss, as JSON
  files.json  {file name: CRC-32} of all files in these two folders
  validation.json  the validation loss, if it was computed after the save

Orbax's manager writes a checkpoint under a temporary name, renames it when it
is complete, and then removes older checkpoints. This module adds files.json,
because Orbax restores flipped bytes without an error. Files are checked against
files.json before they are read, and only this check decides whether a
checkpoint is damaged.
"""

import contextlib
import datetime
import errno
import logging
import math
import os
import pathlib
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from sparse_transformer import atomic, config as config_lib, machine, version
from sparse_transformer.data import Source, files
from sparse_transformer.training.distributed import mesh as mesh_lib, processes
from sparse_transformer.training.step import State

STATE = "state"
ABOUT = "about/metadata"
FILES = "files.json"
VALIDATION = "validation.json"
# The suffix of folders that Orbax is writing or removing.
TEMPORARY = ".orbax-checkpoint-tmp"
# Errors that show that a file is lost. After any other error, such as too many
# open files, the file may be intact.
LOSSES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO}


def provenance(
  config: config_lib.Config, source: Source, has_data: bool = True
) -> dict[str, Any]:
  """Describes a run for its checkpoints: config, data, versions, command.

  Args:
    config: the config of the run.
    source: the data of the run.
    has_data: whether the run was trained on these data. It is False for
      converted weights, which were trained elsewhere. The checksum of the data
      is then None, and the run accepts any data.

  Raises OSError or ValueError if data cannot be read.
  """
  return dict(
    config=config.to_dict(),
    symbols=source.symbols,
    classes=source.classes,
    versions=version.packages() | dict(python=platform.python_version()),
    data=source.digest() if has_data else None,
    examples=len(source.examples("train")) if has_data else None,
    command=version.command(),
    commit=version.commit(),
    machine=machine.machine(),
    begun=datetime.datetime.now().astimezone().isoformat(" ", "minutes"),
  )


class Saved:
  """Reads the checkpoints of a run, which may still be training.

  Args:
    workdir: the folder that contains `checkpoints/`. The attribute `workdir` is
      the absolute path of this folder.
  """

  def __init__(self, workdir: str | os.PathLike):
    self.workdir = pathlib.Path(workdir).absolute()
    self.folder = self.workdir / "checkpoints"

  def path(self, step: int) -> pathlib.Path:
    """Returns the folder of a checkpoint, which may not exist."""
    return self.folder / str(step)

  def steps(self) -> list[int]:
    """Returns the steps of complete checkpoints in ascending order."""
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    numbers = sorted(int(x) for x in names if re.fullmatch("0|[1-9][0-9]*", x))

    # Orbax names a folder by its step only when it is complete. A folder that
    # contains neither of these was not written by a run, or a run is just
    # deleting it.
    def is_finished(step):
      path = self.path(step)
      return (path / STATE).exists() or (path / FILES).exists()

    return [step for step in numbers if is_finished(step)]

  def find(self, step: int | str | None = None) -> int:
    """Finds a saved step.

    Args:
      step: a step, as an integer or as text; "best" for the step with the
        lowest validation loss; or None for the last step.

    Raises FileNotFoundError if there is no such checkpoint.
    """
    steps = self.steps()
    if step is None and steps:
      return steps[-1]
    if step == "best" and (bits := self.validations()):
      return min(bits, key=bits.__getitem__)
    # Compare steps as text, because a user may give any word.
    if str(step) in map(str, steps):
      return int(step)  # type: ignore[arg-type]  # not None

    wanted = "" if step is None else f" of step {step}"
    if step == "best":
      wanted = " that was validated"
    raise FileNotFoundError(
      f"no checkpoint{wanted} in {self.folder}; saved steps:"
      f" {', '.join(map(str, steps)) or 'none'}"
    )

  def validations(self) -> dict[int, float]:
    """Returns {step: validation loss in bits per dim} for all finite losses."""
    bits = {}
    for step in self.steps():
      # The loss may be missing, because not every checkpoint is validated.
      loss = self.describe(step).get("validation")
      if isinstance(loss, float | int) and math.isfinite(loss):
        bits[step] = loss
    return bits

  def describe(self, step: int) -> dict[str, Any]:
    """Reads the `provenance` and `validation` of a step.

    Missing or damaged parts are omitted, because `verify` reports them.
    """
    path = self.path(step)
    description: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
      if not _differing(path, {ABOUT}):
        description |= atomic.read_json(path / ABOUT, dict)

    # This file has no CRC-32, because it may be written after the checkpoint is
    # complete.
    with contextlib.suppress(OSError, ValueError):
      description |= atomic.read_json(path / VALIDATION, dict)

    return description

  def config(self, step: int) -> config_lib.Config:
    """Reads the config with which a step was trained.

    Raises ValueError if the checkpoint is damaged or contains no config.
    """
    place = f"checkpoint {self.path(step)}"
    settings = self.describe(step).get("config")
    if settings is None:
      self.verify(step)
      raise ValueError(f"{place} contains no config, so its run is unknown")

    return config_lib.from_json(settings, f"the config in {place}")

  def check_data(self, step: int, digest: Mapping[str, Any]) -> None:
    """Raises ValueError if a step was trained on other data.

    Converted weights record no checksum of data, so they accept any data.

    Args:
      step: a saved step.
      digest: the description of the current data, see `Source.digest`.
    """
    saved = self.describe(step).get("data")
    if saved not in (None, digest):
      raise ValueError(
        f"checkpoint {self.path(step)} was trained on other data: {saved}"
        f" instead of {digest}; use the data of that run, or another --workdir"
      )

  def check_symbols(self, step: int, source: Source) -> None:
    """Raises ValueError if the symbols or classes of the data differ from those
    saved with a checkpoint.

    Args:
      step: a saved step.
      source: the data to use with the weights of this step.
    """
    saved = self.describe(step)
    here = dict(symbols=source.symbols, classes=list(source.classes))
    for name, meaning in here.items():
      if saved.get(name, meaning) != meaning:
        raise ValueError(
          f"the {name} of the data are {meaning}, but those of checkpoint"
          f" {self.path(step)} are {saved[name]}; use data with the same {name}"
        )

  def verify(self, step: int) -> pathlib.Path:
    """Verifies the files of a checkpoint, and returns its folder.

    Raises:
      FileNotFoundError: a run has just deleted the checkpoint.
      ValueError: the checkpoint is damaged.
    """
    path = self.path(step)
    processes.decide(lambda: _check_files(path))
    return path

  def restore(self, like: State, step: int | str | None = None) -> State:
    """Verifies and restores the state at a step.

    Args:
      like: the shapes, dtypes and shardings of the state, see
        `Experiment.like`. The mesh may differ from the mesh of the run that
        saved the checkpoint.
      step: which step to restore, see `find`.

    Raises:
      FileNotFoundError: there is no such checkpoint, or a run has just deleted
        it.
      ValueError: the checkpoint is damaged, or its network differs from `like`.
    """
    path = self.verify(self.find(step))
    tree = processes.together(lambda: _expected(path, like))
    return State(**_read(path, tree))

  def weights(self, step: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Verifies and restores the averaged weights of a step.

    Args:
      step: a saved step.
      mesh: the mesh over which the weights are split.

    Returns:
      {name: array}, see `by_name`. This works for any network and optimizer.

    Raises:
      FileNotFoundError: a run has just deleted the checkpoint.
      ValueError: the checkpoint is damaged.
    """
    path = self.verify(step)
    like = mesh_lib.split(mesh, {"ema": _shapes(path)["ema"]})
    return by_name(_read(path, like)["ema"])


class Saver:
  """A context manager that saves checkpoints of a run in the background.

  All processes must call its methods in the same order. Each process writes its
  part of the arrays, and the first process also writes everything else.

  Args:
    workdir: the folder in which `checkpoints/` is created.
    keep: the number of latest checkpoints to keep, in addition to the one with
      the lowest validation loss.
    provenance: the description of the run, from `provenance`; also an
      attribute.

  Attributes:
    saved: reads the checkpoints in the workdir.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    keep: int,
    provenance: Mapping[str, Any] | None = None,
  ):
    self.saved = Saved(workdir)
    self._keep = keep
    # Copy it, because the run adds entries.
    self.provenance = dict(provenance or {})
    # The manager is created by the first save, so that a run that is rejected
    # before leaves no files of Orbax behind.
    self._manager: ocp.CheckpointManager | None = None
    # The step that is being written in the background.
    self._saving: int | None = None
    self._attempt(self._prepare)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    if kind is None:
      self.finish()

    # An error here must not hide the error that ended the run.
    if self._manager:
      with contextlib.suppress(Exception):
        self._manager.close()

  def set_damaged_aside(self) -> int | None:
    """Renames the damaged checkpoints that follow the last intact one.

    Each rename is reported on standard error.

    Returns:
      The step of the last intact checkpoint, from which a run resumes, or None.
    """
    for step in reversed(self.saved.steps()):
      path = self.saved.path(step)
      if not (damage := _damage(path)):
        return step

      # Keep the damaged folder for inspection. The same step may have been
      # damaged before, so find a number that is not used yet.
      number = 0
      while (aside := path.with_name(f"damaged-{step}-{number}")).exists():
        number += 1
      path.rename(aside)
      print(
        f"checkpoint {path} cannot be used: {damage}; renamed to {aside.name}",
        file=sys.stderr,
      )

    return None

  def save(self, state: State, validation: float | None = None) -> None:
    """Saves a state in the background, unless its step is already saved.

    Args:
      state: the state to save. Its arrays may be donated after this call.
      validation: the validation loss of the state in bits per dim, or None. If
        the step is already saved without a loss, this loss is added to the
        checkpoint.

    Raises OSError if this save or the previous one failed.
    """
    # Only one save runs at a time. If it failed, this raises its error.
    self.finish()

    step = int(state.step)
    if not processes.decide(lambda: step in self.saved.steps()):
      description = {**self.provenance, "validation": validation}
      args = ocp.args.Composite(
        state=ocp.args.StandardSave(_as_tree(state)),
        about=ocp.args.JsonSave(description),
      )
      self._attempt(lambda: self._start(step, args, validation))
    elif validation is not None:
      processes.decide(lambda: self._add(step, validation))

  def finish(self) -> None:
    """Waits until the last save is complete. Raises OSError if it failed."""
    if self._manager and self._saving is not None:
      try:
        self._attempt(self._manager.wait_until_finished)
      finally:
        self._saving = None
        self._delete_temporary()

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: object
  ) -> list[bool]:
    """Decides which checkpoints to keep when a new one is complete.

    This implements Orbax's interface of preservation policies.

    Args:
      checkpoints: Orbax's descriptions of checkpoints, with `step` and
        `metrics`; the new one is last.
      context: ignored.

    Returns:
      One bool per checkpoint: whether to keep it.
    """
    # The new checkpoint cannot be read yet, because its folder is renamed only
    # later.
    new = checkpoints[-1]
    bits = self.saved.validations()
    if new.metrics is not None:
      bits[new.step] = new.metrics
    best = min(bits, key=bits.__getitem__, default=None)

    # Orbax also lists folders that are not complete checkpoints. No run wrote
    # them, so keep them.
    complete = {new.step}.union(self.saved.steps())
    latest = sorted(complete)[-self._keep :]
    deleted = complete.difference(latest, [best])
    return [checkpoint.step not in deleted for checkpoint in checkpoints]

  def _start(self, step: int, args: Any, validation: float | None) -> None:
    """Starts saving a step with Orbax's manager."""
    # Orbax would delete an existing folder.
    path = self.saved.path(step)
    if path.exists():
      raise FileExistsError(f"{path} is not a checkpoint; move or rename it")

    self._saving = step
    if self._manager is None:
      # Orbax calls this function in the first process before it renames the
      # folder. So a folder named by its step always contains files.json.
      last = ocp.AsyncOptions(post_finalization_callback=self._list_files)
      options = ocp.CheckpointManagerOptions(
        lightweight_initialize=True,
        preservation_policy=self,
        todelete_subdir=f"old{TEMPORARY}",
        async_options=last,
      )
      self._manager = ocp.CheckpointManager(self.saved.folder, options=options)

    self._manager.save(step, args=args, metrics=validation, force=True)

  def _add(self, step: int, validation: float) -> None:
    """Adds a validation loss to a complete checkpoint that lacks one."""
    if self.saved.describe(step).get("validation") is None:
      path = self.saved.path(step) / VALIDATION
      atomic.write_json(path, dict(validation=validation))

  def _list_files(self) -> None:
    """Syncs the files of a checkpoint to disk, and writes files.json."""
    # Without fsync, the rename of the folder may reach the disk before the
    # contents of its files. Files could then be empty after a power failure.
    folder = self.saved.folder / f"{self._saving}{TEMPORARY}"
    listed = {}
    for path in sorted(folder.glob("*/**/*")):
      if path.is_file():
        with path.open("rb") as file:
          os.fsync(file.fileno())
        name = str(path.relative_to(folder))
        listed[name] = files.crc32(path)
    atomic.write_json(folder / FILES, listed, indent=1)

  def _prepare(self) -> None:
    # Delete incomplete checkpoints of killed runs, which might otherwise fill
    # the disk.
    self._delete_temporary()
    if processes.is_first():
      self.saved.folder.mkdir(parents=True, exist_ok=True)

  def _delete_temporary(self) -> None:
    if processes.is_first():
      for path in self.saved.folder.glob(f"*{TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)

  def _attempt(self, function: Callable[[], None]) -> None:
    """Calls a function in all processes; raises its first error as OSError."""

    def attempt():
      try:
        function()
      # Catch any error, because Orbax forwards those of TensorStore.
      except Exception as error:
        raise OSError(
          f"a checkpoint could not be written to {self.saved.folder}:"
          f" {_first_line(error)}; saved steps: {self.saved.steps()}"
        ) from error

    processes.together(attempt)


def by_name(tree: Any) -> dict[str, Any]:
  """Returns {path: leaf} for a pytree, with paths as Orbax writes them.

  >>> by_name({"blocks": {"query": {"bias": 0}}})
  {'blocks.query.bias': 0}
  """
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_files(path: pathlib.Path) -> None:
  """Raises ValueError if files are damaged, FileNotFoundError if deleted."""
  if damage := _damage(path):
    if not path.exists():
      raise FileNotFoundError(f"a run has just deleted checkpoint {path}")
    raise ValueError(
      f"checkpoint {path} is damaged: {damage}; run train.py again to resume"
      " from the last intact checkpoint"
    )


def _damage(path: pathlib.Path) -> str | None:
  """Describes what is wrong with the files of a checkpoint, or returns None.

  Raises OSError if files cannot be read now, which does not mean that they are
  damaged.
  """
  try:
    wrong = _differing(path)
  except (OSError, ValueError, TypeError) as error:
    # Missing permissions or too many open files are not damage. They must not
    # make a run set aside an intact checkpoint.
    if isinstance(error, OSError) and error.errno not in LOSSES:
      raise
    return f"{FILES}: {_first_line(error)}"
  return f"damaged or missing files {', '.join(wrong[:3])}" if wrong else None


def _differing(
  path: pathlib.Path, names: Collection[str] | None = None
) -> list[str]:
  """Returns the names of files that are missing or whose CRC-32 differs.

  Args:
    path: the folder of the checkpoint.
    names: the files to check, or None for all files in files.json.
  """
  listed = {ABOUT: None, **atomic.read_json(path / FILES)}
  return [
    name
    for name in names or listed
    if not (path / name).is_file() or files.crc32(path / name) != listed[name]
  ]


def _expected(path: pathlib.Path, like: State) -> dict[str, Any]:
  """Returns the pytree to restore.

  Raises ValueError if names or shapes differ from those in the checkpoint.
  """
  saved = dict(_shapes(path))
  tree = _as_tree(like)

  # Only float16 uses a loss scale, and evaluation may use a different dtype
  # than training. So restore the loss scale only if both have it.
  if "loss_scale" not in saved or "loss_scale" not in tree:
    saved.pop("loss_scale", None)
    tree.pop("loss_scale", None)

  there = {(name, tuple(x.shape)) for name, x in by_name(saved).items()}
  here = {(name, tuple(x.shape)) for name, x in by_name(tree).items()}
  if differing := sorted({name for name, _ in there ^ here}):
    raise ValueError(
      f"checkpoint {path} is from another network: the shapes of"
      f" {', '.join(differing[:3])} differ; use the model and patterns in the"
      " config.json of its run"
    )

  return tree


def _as_tree(state: State) -> dict[str, Any]:
  """Converts a state to a dict, which Orbax can restore without our classes."""
  return {name: x for name, x in vars(state).items() if x is not None}


def _shapes(path: pathlib.Path) -> dict[str, Any]:
  """Reads the shapes and dtypes in a checkpoint, without reading its arrays."""
  with _reader(path) as orbax:
    return orbax.metadata(path / STATE).item_metadata.tree


def _read(path: pathlib.Path, like: Any) -> dict[str, Any]:
  """Reads only the arrays of a checkpoint that are leaves of `like`."""
  parts = ocp.checkpoint_utils.construct_restore_args(like)
  args = ocp.args.PyTreeRestore(like, restore_args=parts, partial_restore=True)
  with _reader(path) as orbax:
    return orbax.restore(path / STATE, args=args)


@contextlib.contextmanager
def _reader(path: pathlib.Path) -> Iterator[ocp.Checkpointer]:
  """Yields Orbax's reader, and makes its errors name the checkpoint."""
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
      yield orbax
  # Catch any error, because Orbax forwards those of TensorStore.
  except Exception as error:
    # The run may have deleted the checkpoint after its files were verified.
    _check_files(path)
    raise ValueError(
      f"checkpoint {path} is complete, but cannot be restored:"
      f" {_first_line(error)}"
    ) from error


def _first_line(error: Exception) -> str:
  return str(error).split("\n")[0][:200] or type(error).__name__


# Hide Orbax's log messages, because it also raises each error that it logs.
logging.getLogger("absl").addFilter(
  lambda record: "/orbax/checkpoint/" not in record.pathname
)
