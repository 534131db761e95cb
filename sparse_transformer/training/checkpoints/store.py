"""Saves, verifies and restores the checkpoints of a run.

A checkpoint is the folder `checkpoints/<step>/` of a workdir:

  state/      the arrays of the training state
  about/      the config, versions, data digest and validation loss, as JSON
  files.json  {file name: CRC-32} of all files in the two
  validation.json  the validation loss, if it came after the save

Orbax's manager writes it under another name, renames it when it is complete,
and then removes older ones. The list is ours, since Orbax restores flipped
bytes without an error: files are checked against it before anything reads them,
and nothing else decides that a checkpoint is damaged.
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
# The suffix of folders that Orbax is still writing, or already removing.
TEMPORARY = ".orbax-checkpoint-tmp"
# The errors that show that a file is lost. After any other, such as a lack of
# memory, the file may be intact.
LOSSES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO}


def provenance(
  config: config_lib.Config, source: Source, has_data: bool = True
) -> dict[str, Any]:
  """Describes a run for its checkpoints: config, data, versions, command.

  Args:
    config: the run's.
    source: its data.
    has_data: False for converted weights, which were trained elsewhere. The
      digest of the data is then None, and any data fit.

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
    workdir: the folder that contains `checkpoints/`; absolute as an attribute.
  """

  def __init__(self, workdir: str | os.PathLike):
    self.workdir = pathlib.Path(workdir).absolute()
    self.folder = self.workdir / "checkpoints"

  def path(self, step: int) -> pathlib.Path:
    """The folder of a checkpoint, which may not exist."""
    return self.folder / str(step)

  def steps(self) -> list[int]:
    """The steps of the finished checkpoints in ascending order."""
    names = os.listdir(self.folder) if self.folder.is_dir() else []
    numbers = sorted(int(x) for x in names if re.fullmatch("0|[1-9][0-9]*", x))

    # Orbax gives a folder its number only when it is complete. A folder without
    # both was not written by a run, or is just being deleted by one.
    def is_finished(step):
      path = self.path(step)
      return (path / STATE).exists() or (path / FILES).exists()

    return [step for step in numbers if is_finished(step)]

  def find(self, step: int | str | None = None) -> int:
    """Finds a saved step.

    Args:
      step: a number, also as text; "best" for the lowest validation loss; None
        for the last.

    Raises FileNotFoundError if no step is saved, or not that one.
    """
    steps = self.steps()
    if step is None and steps:
      return steps[-1]
    if step == "best" and (bits := self.validations()):
      return min(bits, key=bits.__getitem__)
    # Steps are compared as texts, because a step may not be a number.
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
    """The finite validation losses by step, in bits per dim."""
    bits = {}
    for step in self.steps():
      # It may be missing: not each checkpoint is validated.
      loss = self.describe(step).get("validation")
      if isinstance(loss, float | int) and math.isfinite(loss):
        bits[step] = loss
    return bits

  def describe(self, step: int) -> dict[str, Any]:
    """Reads the `provenance` and `validation` of a step.

    What is missing or damaged is left out: `verify` reports it.
    """
    path = self.path(step)
    description: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, TypeError):
      if not _differing(path, {ABOUT}):
        description |= atomic.read_json(path / ABOUT, dict)

    # It has no CRC-32: it may be written after the checkpoint is complete.
    with contextlib.suppress(OSError, ValueError):
      description |= atomic.read_json(path / VALIDATION, dict)

    return description

  def config(self, step: int) -> config_lib.Config:
    """Reads the config that a step was trained with.

    Raises ValueError if the checkpoint is damaged, or does not say it.
    """
    place = f"checkpoint {self.path(step)}"
    settings = self.describe(step).get("config")
    if settings is None:
      self.verify(step)
      raise ValueError(f"{place} does not say which run it belongs to")

    return config_lib.from_json(settings, f"the config in {place}")

  def check_data(self, step: int, digest: Mapping[str, Any]) -> None:
    """Raises ValueError if a step was trained on data with another digest.

    Converted weights have no digest, and go with any data.
    """
    saved = self.describe(step).get("data")
    if saved not in (None, digest):
      raise ValueError(
        f"checkpoint {self.path(step)} is from a run on other data ({saved})"
        f" than the current data ({digest}); use the same data, or another"
        " --workdir"
      )

  def check_symbols(self, step: int, source: Source) -> None:
    """Raises ValueError if a source has other symbols or classes than a step.

    Args:
      step: a saved one.
      source: the data to use with its weights.
    """
    saved = self.describe(step)
    here = dict(symbols=source.symbols, classes=list(source.classes))
    for name, meaning in here.items():
      if saved.get(name, meaning) != meaning:
        raise ValueError(
          f"the {name} of the data are {meaning}, but those of checkpoint"
          f" {self.path(step)} are {saved[name]}; use data with the same"
        )

  def verify(self, step: int) -> pathlib.Path:
    """Verifies the files of a checkpoint; returns its folder.

    Raises:
      FileNotFoundError: a run has just deleted it.
      ValueError: it is damaged.
    """
    path = self.path(step)
    processes.decide(lambda: _check_files(path))
    return path

  def restore(self, like: State, step: int | str | None = None) -> State:
    """Verifies and restores the state at a step.

    Args:
      like: its shapes, dtypes and shardings, see `Experiment.like`. The mesh
        need not be the one that saved it.
      step: see `find`.

    Raises:
      FileNotFoundError: there is none, or a run has just deleted it.
      ValueError: it is damaged, or from another network than `like`.
    """
    path = self.verify(self.find(step))
    tree = processes.together(lambda: _expected(path, like))
    return State(**_read(path, tree))

  def weights(self, step: int, mesh: Mesh) -> dict[str, jax.Array]:
    """Verifies and restores the averaged weights of a step.

    Args:
      step: a saved one.
      mesh: the devices that they are split over.

    Returns {name: array}, for any network and optimizer; see `by_name`.

    Raises:
      FileNotFoundError: a run has just deleted the checkpoint.
      ValueError: it is damaged.
    """
    path = self.verify(step)
    like = mesh_lib.split(mesh, {"ema": _shapes(path)["ema"]})
    return by_name(_read(path, like)["ema"])


class Saver:
  """Saves the checkpoints of a run in the background; a context manager.

  All processes call its methods, in the same order: each writes its part of the
  arrays, and the first one also writes all else.

  Args:
    workdir: the folder that contains `checkpoints/`, which is created.
    keep: how many of the latest ones to keep, besides the one with the lowest
      validation loss.
    provenance: the description of the run, from `provenance`; an attribute.

  Attributes:
    saved: what is in the workdir.
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
    # A copy, which the run adds to.
    self.provenance = dict(provenance or {})
    # It is made by the first save, so that a run that is refused before leaves
    # nothing of Orbax behind.
    self._manager: ocp.CheckpointManager | None = None
    # The step that is written in the background.
    self._saving: int | None = None
    self._attempt(self._prepare)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    if kind is None:
      self.finish()

    # An error here must not hide the one that ended the run.
    if self._manager:
      with contextlib.suppress(Exception):
        self._manager.close()

  def set_damaged_aside(self) -> int | None:
    """Renames damaged checkpoints after the last intact one.

    Each rename is told by a line on standard error. A run resumes from the
    intact one.

    Returns its step, or None if there is none.
    """
    for step in reversed(self.saved.steps()):
      path = self.saved.path(step)
      if not (damage := _damage(path)):
        return step

      # The damaged folder is kept for whoever wants to look at it. The run may
      # have damaged this step before, hence a number that is free.
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
      state: its arrays may be donated afterwards.
      validation: its bits per dim on that split, if known; a saved step that
        lacks it gets it.

    Raises OSError if this save or the previous one failed.
    """
    # One save runs at a time; its error is raised here at the latest.
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
    """Waits until the last save is complete; raises OSError if it failed."""
    if self._manager and self._saving is not None:
      try:
        self._attempt(self._manager.wait_until_finished)
      finally:
        self._saving = None
        self._delete_temporary()

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: object
  ) -> list[bool]:
    """Tells Orbax which checkpoints to keep, once the last is complete.

    Args:
      checkpoints: Orbax's descriptions, with `step` and `metrics`.
      context: Orbax's.

    Returns whether each of them is kept.
    """
    # The new one cannot be read yet: its folder gets its name later.
    new = checkpoints[-1]
    bits = self.saved.validations()
    if new.metrics is not None:
      bits[new.step] = new.metrics
    best = min(bits, key=bits.__getitem__, default=None)

    # Orbax also names folders that no run has completed. They belong to
    # somebody else, and stay.
    complete = {new.step}.union(self.saved.steps())
    latest = sorted(complete)[-self._keep :]
    deleted = complete.difference(latest, [best])
    return [checkpoint.step not in deleted for checkpoint in checkpoints]

  def _start(self, step: int, args: Any, validation: float | None) -> None:
    """Starts to save a step, as Orbax's manager does."""
    # Orbax would delete what is there.
    path = self.saved.path(step)
    if path.exists():
      raise FileExistsError(f"{path} is not a checkpoint; move it")

    self._saving = step
    if self._manager is None:
      # Orbax calls it in the first process, before the folder gets its name: a
      # folder with a number always has its list of files.
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
    """Adds a validation loss to a complete checkpoint that has none."""
    if self.saved.describe(step).get("validation") is None:
      path = self.saved.path(step) / VALIDATION
      atomic.write_json(path, dict(validation=validation))

  def _list_files(self) -> None:
    """Completes a checkpoint: makes its files durable, and lists them."""
    # Without fsync, the new name of the folder may reach the disk before the
    # contents of its files, and a loss of power leave them empty.
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
    # A killed run may have left half a checkpoint each time, until the disk is
    # full.
    self._delete_temporary()
    if processes.is_first():
      self.saved.folder.mkdir(parents=True, exist_ok=True)

  def _delete_temporary(self) -> None:
    if processes.is_first():
      for path in self.saved.folder.glob(f"*{TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)

  def _attempt(self, function: Callable[[], None]) -> None:
    """Calls a function in all processes; raises the first problem, if any."""

    def attempt():
      try:
        function()
      # Any kind of error: Orbax forwards what TensorStore raises.
      except Exception as error:
        raise OSError(
          f"a checkpoint could not be written to {self.saved.folder}:"
          f" {_first_line(error)}; saved steps: {self.saved.steps()}"
        ) from error

    processes.together(attempt)


def by_name(tree: Any) -> dict[str, Any]:
  """The leaves of a pytree by their paths, spelled as in Orbax.

  >>> by_name({"blocks": {"query": {"bias": 0}}})
  {'blocks.query.bias': 0}
  """
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_files(path: pathlib.Path) -> None:
  """Raises ValueError, or FileNotFoundError, unless files are as saved."""
  if damage := _damage(path):
    if not path.exists():
      raise FileNotFoundError(f"a run has just deleted checkpoint {path}")
    raise ValueError(
      f"checkpoint {path} is damaged: {damage}; train.py sets it aside and"
      " resumes from the last one that is intact"
    )


def _damage(path: pathlib.Path) -> str | None:
  """What is wrong with the files of a checkpoint, in words; None if nothing.

  Raises OSError if they cannot be read now, which says nothing about them.
  """
  try:
    wrong = _differing(path)
  except (OSError, ValueError, TypeError) as error:
    # A lack of permission, or of file handles, is no damage: a run must not set
    # an intact checkpoint aside for it.
    if isinstance(error, OSError) and error.errno not in LOSSES:
      raise
    return f"{FILES}: {_first_line(error)}"
  return f"damaged or missing files {', '.join(wrong[:3])}" if wrong else None


def _differing(
  path: pathlib.Path, names: Collection[str] | None = None
) -> list[str]:
  """The names of files that are missing or have another CRC-32 than saved.

  Args:
    path: the folder of the checkpoint.
    names: the files to look at; None for all that it lists.
  """
  listed = {ABOUT: None, **atomic.read_json(path / FILES)}
  return [
    name
    for name in names or listed
    if not (path / name).is_file() or files.crc32(path / name) != listed[name]
  ]


def _expected(path: pathlib.Path, like: State) -> dict[str, Any]:
  """The tree to restore; raises ValueError if names or shapes differ."""
  saved = dict(_shapes(path))
  tree = _as_tree(like)

  # Only a run in float16 saves a loss scale, and only one reads it: evaluation
  # may use another dtype than training.
  if "loss_scale" not in saved or "loss_scale" not in tree:
    saved.pop("loss_scale", None)
    tree.pop("loss_scale", None)

  there = {(name, tuple(x.shape)) for name, x in by_name(saved).items()}
  here = {(name, tuple(x.shape)) for name, x in by_name(tree).items()}
  if differing := sorted({name for name, _ in there ^ here}):
    raise ValueError(
      f"checkpoint {path} is from another network: the shapes of"
      f" {', '.join(differing[:3])} differ; use the model and patterns of"
      " its run's config.json"
    )

  return tree


def _as_tree(state: State) -> dict[str, Any]:
  """Nested dicts, lists and arrays, which Orbax saves without our classes."""
  return {name: x for name, x in vars(state).items() if x is not None}


def _shapes(path: pathlib.Path) -> dict[str, Any]:
  """The shapes and dtypes that a checkpoint holds, without its arrays."""
  with _reader(path) as orbax:
    return orbax.metadata(path / STATE).item_metadata.tree


def _read(path: pathlib.Path, like: Any) -> dict[str, Any]:
  """Reads the arrays that a tree of shapes names, and leaves out the others."""
  parts = ocp.checkpoint_utils.construct_restore_args(like)
  args = ocp.args.PyTreeRestore(like, restore_args=parts, partial_restore=True)
  with _reader(path) as orbax:
    return orbax.restore(path / STATE, args=args)


@contextlib.contextmanager
def _reader(path: pathlib.Path) -> Iterator[ocp.Checkpointer]:
  """Orbax's reader; its errors in the context tell about the checkpoint."""
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
      yield orbax
  # Any kind of error: Orbax forwards what TensorStore raises.
  except Exception as error:
    # The run may have deleted the checkpoint since its files were verified.
    _check_files(path)
    raise ValueError(
      f"checkpoint {path} is complete, but cannot be restored:"
      f" {_first_line(error)}"
    ) from error


def _first_line(error: Exception) -> str:
  return str(error).split("\n")[0][:200] or type(error).__name__


# Orbax logs the traceback of each error that it also raises.
logging.getLogger("absl").addFilter(
  lambda record: "/orbax/checkpoint/" not in record.pathname
)
