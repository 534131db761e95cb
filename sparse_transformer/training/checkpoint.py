"""Saves, verifies and restores the checkpoints of a run, with Orbax.

A checkpoint is the folder `checkpoints/<step>/` of a workdir:

  state/      the arrays of the training state, written by Orbax
  about/      the config, versions, data digest and validation loss, as JSON
  files.json  {file name: CRC-32} of all files in the two

Orbax restores flipped bytes without an error. Therefore the files are checked
against the list before anything reads them, and nothing else decides that a
checkpoint is damaged.
"""

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from sparse_transformer.data import Images, Stream
from sparse_transformer.training.step import State

FILES = "files.json"


def about(config: ConfigDict, source: Images | Stream) -> dict[str, Any]:
  """Describes a run for its checkpoints: config, versions, data digest."""
  packages = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
  return dict(
    config=config.to_dict(),
    python=platform.python_version(),
    versions={name: importlib.metadata.version(name) for name in packages},
    data=source.digest(),
  )


class Checkpoints:
  """The checkpoints of a workdir; a context manager. Saves in the background.

  Args:
    workdir: the folder that contains `checkpoints/`.
    keep: how many of the latest checkpoints to keep; None for read-only.
    keep_best: how many of those with the lowest validation loss to keep, too.
    about: the description of the run, from `about`.
    on_error: "stop" raises OSError when a checkpoint cannot be written;
      "continue" reports it on standard error.
  """

  def __init__(
    self,
    workdir: str | os.PathLike,
    *,
    keep: int | None = None,
    keep_best: int = 0,
    about: dict[str, Any] | None = None,
    on_error: str = "stop",
  ):
    self._about, self._on_error = about or {}, on_error
    self._saved: int | None = None  # the last step, perhaps still in progress
    self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
    writes = keep is not None
    if writes:
      for path in self._folder.glob("[0-9]*"):
        if path.name.isdigit() and not (path / "state").exists():
          _set_aside(path, "it has no state")  # Orbax would count it
    policies = ocp.checkpoint_managers
    kept = [policies.LatestN(keep), _Best(self._folder, keep_best)]
    self._manager = ocp.CheckpointManager(
      self._folder,
      # In the order in which they are finished: the list of files comes last.
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "about": _AboutHandler(),
        # Only older checkpoints have it; unknown items make Orbax warn.
        "digest": ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept),
        create=writes,
        # Otherwise a reader would delete what a run is writing.
        cleanup_tmp_directories=writes,
      ),
    )

  def __enter__(self) -> "Checkpoints":
    return self

  def __exit__(self, kind: type | None, *_: object) -> None:
    try:
      self._manager.close()
    except Exception as error:  # from a save
      if kind is None:  # otherwise the first error is the one to raise
        self._fail(error)

  def steps(self) -> list[int]:
    """Returns the steps of the finished checkpoints in ascending order."""
    # Orbax takes any folder named by a number for a checkpoint.
    return sorted(
      step
      for step in self._manager.all_steps()
      if (self._path(step) / "state").exists()
    )

  def save(self, state: State, validation: float | None = None) -> None:
    """Saves a state in the background, unless its step is already saved.

    Args:
      state: the training state.
      validation: bits per dim of the last validation, if any.

    Raises:
      OSError: this save or the previous one failed, with on_error="stop".
    """
    step = int(state.step)
    if step in (self._saved, *self.steps()):
      return
    self.finish()  # Orbax would also wait for the previous save
    args = ocp.args.Composite(
      state=ocp.args.StandardSave(_as_tree(state)),
      about=_AboutSave(self._about | dict(validation=validation)),
    )
    try:
      saved = self._manager.save(step, args=args)
    except Exception as error:  # Orbax forwards what TensorStore raises
      self._fail(error)
    else:
      assert saved, f"Orbax did not save step {step}"
      self._saved = step

  def finish(self) -> None:
    """Waits until the last save is complete."""
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      self._fail(error)

  def restore(self, like: State, step: int | None = None) -> State:
    """Returns the verified state at a step, by default the last one.

    Args:
      like: a state with the same shapes (`jax.eval_shape` of `init_state`).
      step: one of `steps()`.

    Raises:
      FileNotFoundError: there is no checkpoint.
      Damaged: a file of the checkpoint is damaged or missing.
      ValueError: there is none of this step, or it is from another network.
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
    path, tree = self._path(step), _as_tree(like)
    _verify(path)
    try:
      saved = _shapes(self._manager.item_metadata(step)["state"].tree)
      expected = _shapes(tree)
      names = sorted(saved.keys() | expected.keys())
      differing = [n for n in names if saved.get(n) != expected.get(n)]
      if not differing:
        args = ocp.args.Composite(state=ocp.args.StandardRestore(tree))
        found = self._manager.restore(step, args=args)["state"]
        return dataclasses.replace(like, **found)
    except Exception as error:  # Orbax forwards what TensorStore raises
      raise ValueError(
        f"checkpoint {path} is complete, but cannot be restored:"
        f" {_first_line(error)}"
      ) from error
    raise ValueError(
      f"checkpoint {path} is from another network: the shapes of"
      f" {', '.join(differing[:3])} differ; omit overrides of the model"
    )

  def restore_last(self, like: State) -> State | None:
    """Returns the state of the last good checkpoint, or None if there is none.

    Damaged ones are renamed, each with a line on standard error.

    Raises:
      ValueError: it is from another network, or from a run on other data.
    """
    while steps := self.steps():
      path = self._path(steps[-1])
      try:
        state = self.restore(like)
      except Damaged as error:
        _set_aside(path, error.reason)
        self._manager.reload()
      else:
        self._check_data(path)
        return state
    return None

  def _check_data(self, path: pathlib.Path) -> None:
    saved, now = _read_about(path).get("data"), self._about.get("data")
    if saved and now and saved != now:
      raise ValueError(
        f"checkpoint {path} is from a run on other data ({_describe(saved)})"
        f" than the current data ({_describe(now)}); use the same data, or"
        " another --workdir"
      )

  def _path(self, step: int) -> pathlib.Path:
    return self._folder / str(step)

  def _fail(self, error: Exception) -> None:
    line = (
      f"a checkpoint could not be written to {self._folder}:"
      f" {_first_line(error)}; earlier checkpoints are intact"
    )
    if self._on_error == "stop":
      raise OSError(line) from error
    print(f"continuing without it: {line}", file=sys.stderr)


class Damaged(ValueError):
  """A file of a checkpoint is damaged or missing."""

  def __init__(self, path: pathlib.Path, reason: str):
    super().__init__(
      f"checkpoint {path} is damaged: {reason}; train.py sets it aside and"
      " resumes from the one before it"
    )
    self.reason = reason


class _AboutHandler(ocp.JsonCheckpointHandler):
  """Writes about/ and then, as the last item, the list of all files.

  Orbax renames the folder of the step afterwards, so that every complete
  checkpoint has its list. What Orbax writes later is not listed:
  commit_success.txt of the step and of about/, and _CHECKPOINT_METADATA. They
  contain dates and class names, and nothing that is restored depends on them.
  """

  def finalize(self, directory: os.PathLike) -> None:
    about = pathlib.Path(directory)  # still under a temporary name
    step = about.parent
    paths = {f"about/{path.name}": path for path in about.iterdir()}
    for path in (step / "state").rglob("*"):
      paths[str(path.relative_to(step))] = path
    files = {n: _crc32(paths[n]) for n in sorted(paths) if paths[n].is_file()}
    (step / FILES).write_text(json.dumps(files, indent=1))


@ocp.args.register_with_handler(_AboutHandler, for_save=True, for_restore=True)
class _AboutSave(ocp.args.JsonSave):
  """Tells Orbax to save with `_AboutHandler`."""


@dataclasses.dataclass(frozen=True)
class _Best:
  """Preserves the checkpoints with the lowest validation loss."""

  folder: pathlib.Path
  number: int

  def should_preserve(
    self, checkpoints: Sequence, *, context: object
  ) -> list[bool]:
    del context
    bits = {}
    for info in checkpoints:
      found = _read_about(self.folder / str(info.step)).get("validation")
      if found is not None:
        bits[info.step] = found
    best = sorted(bits, key=lambda step: (bits[step], step))[: self.number]
    return [info.step in best for info in checkpoints]


def _verify(path: pathlib.Path) -> None:
  """Raises Damaged unless all listed files are as they were written."""
  if not (path / FILES).exists() and not (path / "about").exists():
    return  # an early format, without a list
  try:
    files = json.loads((path / FILES).read_text())
    wrong = [
      name
      for name, crc in files.items()
      if not (path / name).is_file() or _crc32(path / name) != crc
    ]
  except (OSError, ValueError, AttributeError) as error:
    raise Damaged(path, f"{FILES}: {_first_line(error)}") from error
  if wrong:
    raise Damaged(path, f"damaged or missing files {', '.join(wrong[:3])}")


def _crc32(path: pathlib.Path) -> int:
  crc = 0
  with path.open("rb") as file:
    while block := file.read(2**24):
      crc = zlib.crc32(block, crc)
  return crc


def _set_aside(path: pathlib.Path, reason: str) -> None:
  """Renames a checkpoint that cannot be used: nothing is deleted."""
  number = 0
  while (new := path.with_name(f"damaged-{path.name}-{number}")).exists():
    number += 1
  path.rename(new)
  print(
    f"checkpoint {path} cannot be used: {reason}; renamed to {new.name},"
    " using the one before it",
    file=sys.stderr,
  )


def _read_about(path: pathlib.Path) -> dict[str, Any]:
  """The description of a checkpoint's run; {} if there is none."""
  try:
    return json.loads((path / "about" / "metadata").read_text())
  except (OSError, ValueError):
    return {}


def _describe(digest: dict[str, Any]) -> str:
  return ", ".join(f"{name} {value}" for name, value in digest.items())


def _as_tree(state: State) -> dict[str, Any]:
  """Nested dicts, lists and arrays, which Orbax saves without our classes."""
  return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
  """The shape of each array by its path, spelled as in Orbax."""
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): tuple(x.shape)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _first_line(error: Exception) -> str:
  return str(error).split("\n")[0][:200]
