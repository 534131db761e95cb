"""Saves, verifies and restores the checkpoints of a run.

A checkpoint is the folder `checkpoints/<step>/` of a workdir:

  state/      the arrays of the training state, see saved_arrays.py
  about/      the config, versions, data digest and validation loss, as JSON
  files.json  {file name: CRC-32} of all files in the two

A checkpoint has this name only while it is complete: it is written under
another, and is renamed back to that before it is deleted.

Orbax restores flipped bytes without an error. Therefore the files are checked
against the list before anything reads them, and nothing else decides that a
checkpoint is damaged: an error while arrays are restored is not damage.
"""

import concurrent.futures
import contextlib
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from sparse_transformer import atomic, config as config_lib, schema, version
from sparse_transformer.data import Source, files
from sparse_transformer.training.checkpoints import saved_arrays
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.step import State

FILES = "files.json"
TEMPORARY = ".orbax-checkpoint-tmp"


def about(config: schema.Config, source: Source) -> dict[str, Any]:
  """Describes a run for its checkpoints: config, versions, data digest."""
  return dict(
    config=config.to_dict(),
    symbols=source.symbols,
    versions=version.packages() | dict(python=platform.python_version()),
    data=source.digest(),
  )


class Checkpoints:
  """The checkpoints of a workdir; a context manager. Saves in the background.

  Other files and folders in `checkpoints/` are left alone. One whose name is
  needed for a checkpoint is renamed.

  Args:
    workdir: the folder that contains `checkpoints/`; absolute as an attribute.
    keep: how many of the latest checkpoints to keep; None for read-only.
    keep_best: how many of those with the lowest validation loss to also keep.
    about: the description of the run, from `about`.
    free: what fields in which `about` may differ from the checkpoint to resume
      from may affect, see `config.AFFECTS`.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    keep: int | None = None,
    keep_best: int = 0,
    about: dict[str, Any] | None = None,
    free: Collection[str] = config_lib.FREE,
  ):
    self._free = free
    self.workdir = pathlib.Path(workdir).absolute()
    self._folder = self.workdir / "checkpoints"
    self._keep, self._keep_best = keep or 0, keep_best
    self._about = about or {}
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._saving: concurrent.futures.Future | None = None
    if keep is not None:
      self._attempt(self._prepare)

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    self._thread.shutdown()
    if kind is None:  # otherwise the first error is the one to raise
      self.finish()

  def steps(self) -> list[int]:
    """Returns the steps of the finished checkpoints in ascending order."""
    names = {
      path.parent.name
      for part in (saved_arrays.FOLDER, FILES)  # one may have been deleted
      for path in self._folder.glob(f"[0-9]*/{part}")
    }
    return sorted(int(x) for x in names if x.isdecimal() and str(int(x)) == x)

  def fingerprint(self, step: int) -> str | None:
    """Returns a CRC-32 of a checkpoint's contents; None if it is unknown."""
    try:
      return f"{files.crc32(self._path(step) / FILES):08x}"
    except OSError:
      return None

  def describe(self, step: int) -> dict[str, Any]:
    """Returns the `about` of a checkpoint; {} if it cannot be read."""
    return _read_about(self._path(step))

  def check_step(self, step: int | None) -> int:
    """Returns a step that is saved; None stands for the last one.

    Raises:
      FileNotFoundError: no checkpoint exists.
      ValueError: no checkpoint of this step exists.
    """
    steps = self.steps()
    if not steps:
      raise FileNotFoundError(
        f"{self._folder} holds no checkpoint; train.py writes them"
      )
    step = steps[-1] if step is None else step
    if step not in steps:
      raise ValueError(
        f"no checkpoint of step {step} in {self._folder}; saved steps:"
        f" {', '.join(map(str, steps))}"
      )
    return step

  def save(self, state: State, validation: float | None = None) -> None:
    """Saves a state in the background, unless its step is already saved.

    With it, its bits per dim on validation data, if known.

    Raises:
      OSError: this save or the previous one failed.
    """
    self.finish()
    step = int(state.step)
    if not processes.decide(lambda: step in self.steps()):
      tree = saved_arrays.as_tree(state)
      about = self._about | dict(validation=validation)
      self._attempt(lambda: _make_empty(self._new(step)))
      self._attempt(lambda: self._start(step, tree, about))

  def finish(self) -> None:
    """Waits until the last save is complete.

    Raises:
      OSError: it failed.
    """
    saving, self._saving = self._saving, None
    if saving:
      self._attempt(saving.result)

  def restore(self, like: State, step: int | None = None) -> State:
    """Returns the verified state at a step, by default the last one.

    Args:
      like: the shapes of the state, with their shardings, on any mesh, if it is
        restored on several devices, see `Experiment.like`.
      step: one of `steps()`.

    Raises:
      FileNotFoundError: no checkpoint exists, or a run has just deleted it.
      ValueError: no checkpoint of this step exists, a file of it is damaged or
        missing, or it is from another network.
    """
    path = self._path(self.check_step(step))
    try:
      if damage := _damage(path):
        raise ValueError(
          f"checkpoint {path} is damaged: {damage}; train.py sets it aside and"
          " resumes from the last one that is intact"
        )
      return _load(path, like)
    except ValueError as error:
      if path.exists():
        raise
      raise FileNotFoundError(
        f"checkpoint {path} has just been deleted, as the run that is training"
        " there keeps only its last and best"
      ) from error

  def weights(self, step: int, mesh: Mesh) -> dict[str, jax.Array]:
    """The verified averaged weights of a step by name, split over a mesh.

    Raises:
      ValueError: the checkpoint is damaged.
    """
    path = self._path(step)
    if damage := processes.decide(lambda: _damage(path)):
      if not path.exists():
        raise FileNotFoundError(f"checkpoint {path} has just been deleted")
      raise ValueError(f"checkpoint {path} is damaged: {damage}")
    found = saved_arrays.read_weights(path, mesh)
    return saved_arrays.by_name(found["ema"])

  def restore_last(self, like: State) -> State | None:
    """Returns the state of the last good checkpoint, or None if there is none.

    Damaged ones are renamed, each with a line on standard error.

    Raises:
      ValueError: it is from another network, or from a run with another config
        or on other data.
    """
    step = processes.decide(self._last_intact)
    return None if step is None else _load(self._path(step), like)

  def _last_intact(self) -> int | None:
    """The step of the last checkpoint whose files are as they were written."""
    for step in reversed(self.steps()):
      path = self._path(step)
      if not (damage := _damage(path)):
        if self._about:
          config = config_lib.from_json(self._about["config"], path)
          self.check(step, config, self._about["data"], self._free)
        return step
      _set_aside(path, "damaged", f"checkpoint {path} cannot be used: {damage}")
    return None

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / str(step)

  def _new(self, step: int) -> pathlib.Path:
    """Where a checkpoint is while it is written."""
    return self._folder / f"{step}{TEMPORARY}"

  def _prepare(self) -> None:
    """Makes the folder, and finds out early whether it can be written to."""
    if not processes.is_first():
      return
    self._folder.mkdir(parents=True, exist_ok=True)
    for path in self._folder.glob(f"[0-9]*{TEMPORARY}"):
      # What a killed run was writing or deleting.
      shutil.rmtree(path, ignore_errors=True)
    probe = self._new(0)
    probe.mkdir()
    probe.rmdir()

  def _start(self, step: int, tree: Any, about: dict[str, Any]) -> None:
    writing = saved_arrays.start_writing(self._new(step), tree)
    self._saving = self._thread.submit(self._complete, writing, step, about)

  def _complete(self, writing: Any, step: int, about: dict[str, Any]) -> None:
    """Adds the rest when the arrays are written, and prunes older ones."""
    path, new = self._path(step), self._new(step)
    try:
      writing.close()
      if not processes.is_first():
        return
      (new / "about").mkdir()
      atomic.write_json(new / "about" / "metadata", about, indent=1)
      paths = sorted(path for path in new.rglob("*") if path.is_file())
      listed = {str(x.relative_to(new)): files.crc32(x) for x in paths}
      atomic.write_json(new / FILES, listed, indent=1)
      if path.exists():
        _set_aside(path, "other", f"{path} is not a checkpoint")
      new.rename(path)
    except BaseException:
      if processes.is_first():
        shutil.rmtree(new, ignore_errors=True)
      raise
    self._prune()

  def best_step(self) -> int:
    """The saved step with the fewest bits on validation data in training.

    Raises:
      FileNotFoundError: no checkpoint exists.
      ValueError: none was validated.
    """
    self.check_step(None)
    if not (best := self._by_validation()):
      raise ValueError(
        f"no checkpoint in {self._folder} was validated; name a step"
      )
    return best[0]

  def _by_validation(self) -> list[int]:
    """The steps that were validated, the best first."""
    steps = self.steps()
    bits = {s: _read_about(self._path(s)).get("validation") for s in steps}
    known = {s: x for s, x in bits.items() if x is not None}
    return sorted(known, key=known.__getitem__)

  def _prune(self) -> None:
    steps, best = self.steps(), self._by_validation()[: self._keep_best]
    for step in {*steps[: -self._keep]}.difference(best):
      _delete(self._path(step))

  def check(
    self,
    step: int,
    config: schema.Config,
    data: Mapping[str, int | str] | None,
    free: Collection[str] = config_lib.FREE,
  ) -> config_lib.Changes:
    """Checks that a checkpoint is from a run with a config, on some data.

    None as their digest does not compare the data; free fields may differ, and
    those that do are returned, see `config.check_config`.

    Raises:
      ValueError: it is not, or does not say of what run it is.
    """
    place = f"checkpoint {self._path(step)}"
    saved = self.describe(step)
    if not {"config", "data"} <= saved.keys():
      raise ValueError(f"{place} does not say of which run it is")
    before = config_lib.from_json(saved["config"], f"the config in {place}")
    changes = config_lib.check_changes(place, before, config, free)
    if data is not None and saved["data"] != data:
      there, here = (
        ", ".join(f"{name} {value}" for name, value in x.items())
        for x in (saved["data"], data)
      )
      raise ValueError(
        f"{place} is from a run on other data ({there}) than the"
        f" current data ({here}); use the same data, or another --workdir"
      )
    return changes

  def _attempt(self, function: Callable[[], Any]) -> None:
    """Calls a function in all processes; raises the first problem, if any."""
    problem = ""
    try:
      function()
    except Exception as error:  # Orbax forwards what TensorStore raises
      problem = saved_arrays.first_line(error) or type(error).__name__
    problem = next(filter(None, processes.gather(problem)), "")
    if problem:
      processes.decide(lambda: self._fail(problem))

  def _fail(self, problem: str) -> None:
    steps = self.steps()
    last = f"the last is of step {steps[-1]}" if steps else "there is no other"
    raise OSError(
      f"a checkpoint could not be written to {self._folder}: {problem}; {last}"
    )


def _make_empty(folder: pathlib.Path) -> None:
  if processes.is_first():
    shutil.rmtree(folder, ignore_errors=True)  # of a save that failed
    folder.mkdir()


def _load(path: pathlib.Path, like: State) -> State:
  """The state in a checkpoint whose files are intact."""
  found = saved_arrays.read(path, like)
  if (step := int(found["step"])) != int(path.name):
    raise ValueError(f"checkpoint {path} is of step {step}; rename it")
  return State(**found)


def _damage(path: pathlib.Path) -> str | None:
  """What is wrong with the files of a checkpoint; None if they are intact."""
  try:
    listed = atomic.read_json(path / FILES)
    if "about/metadata" not in listed:
      raise ValueError("it does not list about/metadata")
    wrong = [
      name
      for name, crc in listed.items()
      if not (path / name).is_file() or files.crc32(path / name) != crc
    ]
  except (OSError, ValueError, AttributeError) as error:
    return f"{FILES}: {saved_arrays.first_line(error)}"
  return f"damaged or missing files {', '.join(wrong[:3])}" if wrong else None


def _set_aside(path: pathlib.Path, prefix: str, reason: str) -> None:
  """Renames what cannot be used or is in the way: nothing is deleted."""
  number = 0
  while (new := path.with_name(f"{prefix}-{path.name}-{number}")).exists():
    number += 1
  path.rename(new)
  print(f"{reason}; renamed to {new.name}", file=sys.stderr)


def _delete(path: pathlib.Path) -> None:
  """Deletes a checkpoint; if killed, leaves nothing that looks like one."""
  new = path.with_name(path.name + TEMPORARY)
  with contextlib.suppress(OSError):  # one that stays does no harm
    shutil.rmtree(new, ignore_errors=True)
    path.rename(new)
    shutil.rmtree(new)


def _read_about(path: pathlib.Path) -> dict[str, Any]:
  """The description of a checkpoint's run; {} if there is none."""
  try:
    found = atomic.read_json(path / "about" / "metadata")
  except (OSError, ValueError):
    return {}
  return found if isinstance(found, dict) else {}
