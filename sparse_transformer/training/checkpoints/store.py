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
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh

from sparse_transformer import (
  atomic,
  config as config_lib,
  machine,
  schema,
  version,
)
from sparse_transformer.data import Source, files
from sparse_transformer.training.distributed import mesh as mesh_lib, processes
from sparse_transformer.training.step import State

STATE, ABOUT, FILES = "state", "about/metadata", "files.json"
# How a file is lost: any other error may pass, and the file be intact.
LOSSES = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.EIO}
VALIDATION = "validation.json"
TEMPORARY = ".orbax-checkpoint-tmp"  # ends names of what is written or removed


def about(
  config: config_lib.Config, source: Source, has_data: bool = True
) -> dict[str, Any]:
  """Describes a run for its checkpoints: config, data, versions, command.

  Without data, as of converted weights, their digest is None: any data fit.
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


class Checkpoints:
  """The checkpoints of a workdir; a context manager. Saves in the background.

  Args:
    workdir: the folder that contains `checkpoints/`; absolute as an attribute.
    keep: how many of the latest ones to keep, besides the one with the lowest
      validation loss; None for read-only.
    about: the description of the run, from `about`; an attribute.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    keep: int | None = None,
    about: dict[str, Any] | None = None,
  ):
    self.workdir = pathlib.Path(workdir).absolute()
    self._folder = self.workdir / "checkpoints"
    self._keep, self.about = keep or 0, about or {}
    self._manager: ocp.CheckpointManager | None = None  # from the first save on
    self._saving: int | None = None  # a step
    if keep is not None:
      self._attempt(self._prepare)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    if kind is None:
      self.finish()
    if self._manager:
      with contextlib.suppress(Exception):  # the first error is the one raised
        self._manager.close()

  def steps(self) -> list[int]:
    """The steps of the finished checkpoints in ascending order."""
    names = os.listdir(self._folder) if self._folder.is_dir() else []
    steps = sorted(int(x) for x in names if re.fullmatch("0|[1-9][0-9]*", x))
    paths = {x: self._path(x) for x in steps}  # some may be deleted
    has = lambda path: (path / STATE).exists() or (path / FILES).exists()
    return [step for step, path in paths.items() if has(path)]

  def find(self, step: int | str | None) -> int:
    """A saved step: None finds the last, "best" the lowest validation loss.

    Any other text is that of a number. Raises FileNotFoundError if no step is
    saved, or not that one.
    """
    steps = self.steps()
    if step is None and steps:
      return steps[-1]
    if step == "best" and (bits := self._bits()):
      return min(bits, key=bits.__getitem__)
    if str(step) in map(str, steps):
      return int(step)  # type: ignore[arg-type]  # not None
    wanted = "" if step is None else f" of step {step}"
    if step == "best":
      wanted = " that was validated"
    raise FileNotFoundError(
      f"no checkpoint{wanted} in {self._folder}; saved steps:"
      f" {', '.join(map(str, steps)) or 'none'}"
    )

  def describe(self, step: int) -> dict[str, Any]:
    """The `about` of a checkpoint, without what is damaged."""
    path, found = self._path(step), dict[str, Any]()
    with contextlib.suppress(OSError, ValueError, TypeError):
      if not _differing(path, {ABOUT}):
        found |= atomic.read_json(path / ABOUT, dict)
    with contextlib.suppress(OSError, ValueError):
      found |= atomic.read_json(path / VALIDATION, dict)
    return found

  def check(
    self,
    step: int,
    config: config_lib.Config,
    data: Mapping[str, Any] | None,
    allowed: config_lib.Allowed = config_lib.TO_RESUME,
  ) -> config_lib.Changes:
    """Checks that a checkpoint is from a run with a config, on some data.

    A digest of None, here or there, does not compare the data: a converted run
    has none. Returns the free fields that differ.
    Raises ValueError if it is from another run, or does not say from which.
    """
    place, saved = f"checkpoint {self._path(step)}", self.describe(step)
    if not {"config", "data"} <= saved.keys():
      self.verify(step)
      raise ValueError(f"{place} does not say which run it belongs to")
    before = config_lib.from_json(saved["config"], f"the config in {place}")
    changes = config_lib.compare(before, config, allowed, place)
    if None not in (data, saved["data"]) and data != saved["data"]:
      raise ValueError(
        f"{place} is from a run on other data ({saved['data']}) than the"
        f" current data ({data}); use the same data, or another --workdir"
      )
    return changes

  def config(self, step: int) -> config_lib.Config:
    """The config that made a checkpoint; config.json has what affects nothing.

    Raises ValueError if that file is of another run, OSError if it is missing.
    """
    now = config_lib.read_config(self.workdir)
    changes = self.check(step, now, None, config_lib.TO_CHANGE).items()
    made = lambda field: schema.affects(field) not in config_lib.TO_RESUME
    return now.replace(**{x: old for x, (old, _) in changes if made(x)})

  def has_other_data(self, step: int, config: config_lib.Config) -> bool:
    """Whether a config names other data than the run's."""
    own = self.config(step).data
    return (own.name, own.path) != (config.data.name, config.data.path)

  def check_symbols(self, step: int, source: Source) -> None:
    """Raises ValueError if symbols or classes mean something else here."""
    saved = self.describe(step)
    here = dict(symbols=source.symbols, classes=[*source.classes])
    if differing := [x for x in here if saved.get(x, here[x]) != here[x]]:
      name = differing[0]
      raise ValueError(
        f"the {name} of the data are {here[name]}, but those of checkpoint"
        f" {self._path(step)} are {saved[name]}; use data with the same"
      )

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / str(step)

  def _bits(self) -> dict[int, float]:
    found: Any = {x: self.describe(x).get("validation") for x in self.steps()}
    if found.keys() != {*self.steps()}:  # a run has just deleted some
      return self._bits()
    known = {x: y for x, y in found.items() if isinstance(y, float | int)}
    return {step: bits for step, bits in known.items() if math.isfinite(bits)}

  def save(self, state: State, validation: float | None = None) -> None:
    """Saves a state in the background, unless its step is already saved.

    `validation` is its bits per dim on that split, if known; a saved step that
    lacks it gets it. The arrays may be donated afterwards.
    Raises OSError if this save or the previous one failed.
    """
    self.finish()
    step = int(state.step)
    if not processes.decide(lambda: step in self.steps()):
      about = self.about | dict(validation=validation)
      args = ocp.args.Composite(
        state=ocp.args.StandardSave(_as_tree(state)),
        about=ocp.args.JsonSave(about),
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

  def _start(self, step: int, args: Any, validation: float | None) -> None:
    if self._path(step).exists():  # Orbax would delete it
      raise FileExistsError(f"{self._path(step)} is not a checkpoint; move it")
    self._saving = step
    if self._manager is None:
      # Called before the folder gets its name, in the first process.
      last = ocp.AsyncOptions(post_finalization_callback=self._list_files)
      options = ocp.CheckpointManagerOptions(
        lightweight_initialize=True,
        preservation_policy=self,
        todelete_subdir=f"old{TEMPORARY}",
        async_options=last,
      )
      self._manager = ocp.CheckpointManager(self._folder, options=options)
    self._manager.save(step, args=args, metrics=validation, force=True)

  def _add(self, step: int, validation: float) -> None:
    if self.describe(step).get("validation") is None:
      atomic.write_json(
        self._path(step) / VALIDATION, dict(validation=validation)
      )

  def _list_files(self) -> None:
    """Completes a checkpoint: makes its files durable, and lists them."""
    folder, listed = self._folder / f"{self._saving}{TEMPORARY}", {}
    for path in sorted(x for x in folder.glob("*/**/*") if x.is_file()):
      with path.open("rb") as file:
        os.fsync(file.fileno())
      listed[str(path.relative_to(folder))] = files.crc32(path)
    atomic.write_json(folder / FILES, listed, indent=1)

  def should_preserve(
    self, checkpoints: Sequence[Any], *, context: object
  ) -> list[bool]:
    """Tells Orbax which checkpoints to keep, once the last is complete."""
    new, bits = checkpoints[-1], self._bits()
    if new.metrics is not None:
      bits[new.step] = new.metrics
    steps = sorted({*self.steps(), new.step})  # complete checkpoints
    best = min(bits, key=bits.__getitem__, default=None)
    kept = {*steps[-self._keep :], best}
    return [x.step in kept or x.step not in steps for x in checkpoints]

  def _prepare(self) -> None:
    """Makes the folder, and finds out early whether it can be written to."""
    self._delete_temporary()  # which may fill the disk
    if processes.is_first():
      probe = self._folder / f"probe{TEMPORARY}"
      probe.mkdir(parents=True)
      probe.rmdir()

  def _delete_temporary(self) -> None:
    if processes.is_first():
      for path in self._folder.glob(f"*{TEMPORARY}"):
        shutil.rmtree(path, ignore_errors=True)

  def _attempt(self, function: Callable[[], None]) -> None:
    """Calls a function in all processes; raises the first problem, if any."""

    def attempt():
      try:
        function()
      except Exception as error:  # Orbax forwards what TensorStore raises
        raise OSError(
          f"a checkpoint could not be written to {self._folder}:"
          f" {_first_line(error)}; saved steps: {self.steps()}"
        ) from error

    processes.together(attempt)

  def restore(self, like: State, step: int | str | None = None) -> State:
    """The verified state at a step, by default the last, on any mesh.

    Raises:
      FileNotFoundError: there is none, or a run has just deleted it.
      ValueError: it is damaged, or from another network than `like`.
    """
    path = self.verify(self.find(step))
    tree = processes.together(lambda: _expected(path, like))
    return State(**_read(path, tree))

  def weights(self, step: int, mesh: Mesh) -> dict[str, jax.Array]:
    """The verified averaged weights of a step by name, split over a mesh."""
    path = self.verify(step)
    like = mesh_lib.split(mesh, {"ema": _shapes(path)["ema"]})
    return by_name(_read(path, like)["ema"])

  def last_intact(self) -> int | None:
    """The name of the last intact checkpoint, or None if there is none.

    Damaged ones are renamed, each with a line on standard error.
    """
    for step in reversed(self.steps()):
      path, number = self._path(step), 0
      if not (damage := _damage(path)):
        return step
      while (new := self._folder / f"damaged-{step}-{number}").exists():
        number += 1
      path.rename(new)
      line = (
        f"checkpoint {path} cannot be used: {damage}; renamed to {new.name}"
      )
      print(line, file=sys.stderr)
    return None

  def check_step(self, step: int) -> None:
    """Raises ValueError if a checkpoint is of another step."""
    processes.together(lambda: _check_step(self._path(step)))

  def check_network(self, step: int, like: State) -> None:
    """Raises ValueError if a checkpoint is of another network."""
    processes.together(lambda: _expected(self._path(step), like))

  def verify(self, step: int) -> pathlib.Path:
    """The folder of a checkpoint, once its files and its step are verified.

    Raises:
      FileNotFoundError: a run has just deleted it.
      ValueError: it is damaged, or of another step.
    """
    path = self._path(step)
    processes.decide(lambda: _check_files(path))
    self.check_step(step)
    return path


def by_name(tree: Any) -> dict[str, Any]:
  """The leaves of a pytree by their paths, spelled as in Orbax."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _check_files(path: pathlib.Path) -> None:
  if damage := _damage(path):
    if not path.exists():
      raise FileNotFoundError(f"a run has just deleted checkpoint {path}")
    raise ValueError(
      f"checkpoint {path} is damaged: {damage}; train.py sets it aside and"
      " resumes from the last one that is intact"
    )


def _damage(path: pathlib.Path) -> str | None:
  try:
    wrong = _differing(path)
  except (OSError, ValueError, TypeError) as error:
    if isinstance(error, OSError) and error.errno not in LOSSES:
      raise  # such as a lack of permission, or of open files
    return f"{FILES}: {_first_line(error)}"
  return f"damaged or missing files {', '.join(wrong[:3])}" if wrong else None


def _differing(
  path: pathlib.Path, names: Collection[str] | None = None
) -> list[str]:
  """The names of files that are not as saved; by default among all."""
  listed = {ABOUT: None, **atomic.read_json(path / FILES)}
  return [
    name
    for name in names or listed
    if not (path / name).is_file() or files.crc32(path / name) != listed[name]
  ]


def _check_step(path: pathlib.Path) -> None:
  step = int(_read(path, {"step": np.zeros((), np.int32)})["step"])
  if step != int(path.name):
    raise ValueError(f"checkpoint {path} is of step {step}; rename it")


def _expected(path: pathlib.Path, like: State) -> dict[str, Any]:
  found, tree = dict(_shapes(path)), _as_tree(like)
  if not found.keys() & tree.keys() & {"loss_scale"}:
    for x in (found, tree):  # evaluation may use another dtype than training
      x.pop("loss_scale", None)
  saved, expected = (
    {(name, tuple(leaf.shape)) for name, leaf in by_name(x).items()}
    for x in (found, tree)
  )
  if differing := sorted({name for name, _ in saved ^ expected}):
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
  with _reader(path) as orbax:
    return orbax.metadata(path / STATE).item_metadata.tree


def _read(path: pathlib.Path, like: Any) -> dict[str, Any]:
  parts = ocp.checkpoint_utils.construct_restore_args(like)
  args = ocp.args.PyTreeRestore(like, restore_args=parts, partial_restore=True)
  with _reader(path) as orbax:
    return orbax.restore(path / STATE, args=args)


@contextlib.contextmanager
def _reader(path: pathlib.Path) -> Iterator[ocp.Checkpointer]:
  try:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as orbax:
      yield orbax
  except Exception as error:  # Orbax forwards what TensorStore raises
    _check_files(path)  # which may have gone since they were verified
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
