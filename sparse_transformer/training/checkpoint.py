"""Checkpoints of a run: save, verify, restore. Thin over Orbax.

A workdir holds `config.json` and `checkpoints/<step>/`. Beside the state
stands a digest of each array: Orbax restores flipped bytes without a word,
so what is read back is checked against it.
"""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import pathlib
import platform
import sys
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp

from sparse_transformer import atomic

FILES = "files.json"


def about(config, source):
  """What a checkpoint says of its run: config, versions, digest of the data."""
  packages = "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy"
  return dict(
    config=config.to_dict(),
    python=platform.python_version(),
    versions={name: importlib.metadata.version(name) for name in packages},
    data=source.digest(),
  )


class Checkpoints:
  """The checkpoints of a workdir. Saving goes on in the background."""

  def __init__(
    self, workdir, *, keep=None, keep_best=0, about=None, on_error="stop"
  ):
    """keep: how many of the last ones stay; None only reads. keep_best: how
    many of the lowest validation stay, too. about: see `about`. on_error:
    "continue" tells of what cannot be written, "stop" raises OSError."""
    self._about, self._keep, self._keep_best = about, keep, keep_best
    self._on_error, self._saved = on_error, None
    self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
    if keep is not None:
      self._clear()
    self._manager = self._make_manager()

  def _make_manager(self):
    writes = self._keep is not None
    policies = ocp.checkpoint_managers
    kept = [policies.LatestN(self._keep), _Best(self._folder, self._keep_best)]
    return ocp.CheckpointManager(
      self._folder,
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "digest": ocp.JsonCheckpointHandler(),
        "about": ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(kept),
        create=writes,
        # A reader would delete what a run beside it is writing.
        cleanup_tmp_directories=writes,
        async_options=ocp.AsyncOptions(
          post_finalization_callback=self._list_files
        ),
      ),
    )

  def __enter__(self):
    return self

  def __exit__(self, kind, *_):
    try:
      self._manager.close()
      self._seal()
    except Exception as error:  # of a save
      if kind is None:  # else what went wrong first goes on
        self._fail(error)

  def _clear(self):
    """Sets folders of steps aside that are none: Orbax would count them."""
    for folder in self._folder.glob("[0-9]*"):
      if folder.name.isdigit() and not (folder / "digest").exists():
        self._set_aside(folder.name, "it has no digest")

  def _set_aside(self, step, reason):
    """Renames a checkpoint that cannot be read, so that none is lost."""
    old, number = self._folder / str(step), 0
    while (new := self._folder / f"damaged-{step}-{number}").exists():
      number += 1
    old.rename(new)
    print(
      f"checkpoint {old} cannot be read: {reason}; it is {new.name} now, and"
      " the one before it is used",
      file=sys.stderr,
    )

  def _list_files(self):
    """Puts a list of its files into the checkpoint that is being finished.

    It is checked first: at a damaged file Orbax gives up its other reads,
    and each of them fills the terminal.
    """
    unfinished = self._folder.glob("*.orbax-checkpoint-tmp*")
    folder = max(unfinished, key=lambda path: path.stat().st_mtime)
    _add_files(folder, folder.glob("*/**/*"))

  def _seal(self):
    """Adds to the list of the last checkpoint what Orbax wrote after it."""
    folder = self._folder / str(self._saved)
    if folder.exists():
      # Without it, on a full disk, the state is verified all the same.
      with contextlib.suppress(OSError):
        _add_files(folder, folder.glob("*"))

  def _damaged_files(self, step):
    folder = self._folder / str(step)
    if not (folder / FILES).exists():
      # Old checkpoints have none: the digest of the arrays decides.
      return [FILES] if (folder / "about").exists() else []
    files = json.loads((folder / FILES).read_text())
    return [
      name
      for name, digest in files.items()
      if not (folder / name).is_file()
      or zlib.crc32((folder / name).read_bytes()) != digest
    ]

  def steps(self):
    """The steps that were saved whole, in order."""
    # Orbax takes an empty folder for a checkpoint; ours all have their digest.
    return sorted(
      step
      for step in self._manager.all_steps()
      if (self._folder / str(step) / "digest").exists()
    )

  def save(self, state, validation=None):
    """Saves in the background. validation: bits of the last one.

    It may be the save before this one whose failure is noticed now.
    """
    step = int(state.step)
    if step in (self._saved, *self.steps()):
      return
    self.finish()  # the one before; Orbax would wait for it as well
    tree = _as_tree(state)
    about = (self._about or {}) | dict(validation=validation)
    try:
      saved = self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(tree),
          digest=ocp.args.JsonSave(_digest(tree)),
          about=ocp.args.JsonSave(about),
        ),
      )
    except Exception as error:  # Orbax raises what TensorStore gives it
      self._fail(error)
    else:
      assert saved, f"Orbax did not save step {step}"
      self._saved = step  # it may still be on its way

  def finish(self):
    """Waits until all is saved."""
    try:
      self._manager.wait_until_finished()
      self._seal()
    except Exception as error:
      self._fail(error)

  def _fail(self, error):
    line = (
      f"a checkpoint could not be written into {self._folder}:"
      f" {_first_line(error)}; those before it are whole"
    )
    if self._on_error == "stop":
      raise OSError(line) from error
    print(f"goes on without it: {line}", file=sys.stderr)

  def restore_last(self, like):
    """The state of the last checkpoint that can be read, None without any.

    Others are set aside, each with a line on standard error. Raises
    ValueError if it was saved by a run on other data.
    """
    while steps := self.steps():
      try:
        state = self.restore(like)
      except Unreadable as error:
        self._manager.close()
        self._set_aside(steps[-1], error.reason)
        self._manager = self._make_manager()
      else:
        self._check_data(steps[-1])
        return state
    return None

  def _check_data(self, step):
    saved = _read_about(self._folder, step).get("data")
    now = (self._about or {}).get("data")
    if saved and now and saved != now:
      raise ValueError(
        f"checkpoint {self._folder / str(step)} is of a run on other data"
        f" ({_describe(saved)}) than data.path holds now ({_describe(now)});"
        " use the same data, or another --workdir"
      )

  def restore(self, like, step=None):
    """The state at a step, by default the last one, verified.

    like: a state of the same shapes (`jax.eval_shape` of `init_state`).
    """
    steps = self.steps()
    if not steps:
      raise FileNotFoundError(
        f"{self._folder} holds no checkpoint; train.py writes them"
      )
    if step is None:
      step = steps[-1]
    if step not in steps:
      raise ValueError(
        f"no checkpoint of step {step} in {self._folder}; there are"
        f" {', '.join(map(str, steps))}"
      )
    tree = _as_tree(like)
    try:
      if damaged := self._damaged_files(step):
        raise ValueError(f"damaged or missing: {', '.join(damaged[:3])}")
      saved = self._manager.item_metadata(step)["state"].tree
      other = _differing(_shapes(saved), _shapes(tree))
    except Exception as error:  # Orbax raises what its files make it
      raise self._unreadable(step, _first_line(error)) from error
    if other:
      raise ValueError(
        f"checkpoint {self._folder / str(step)} is of another network: the"
        f" shapes of {', '.join(other[:3])} differ; leave out overrides of"
        " the model"
      )
    try:
      found = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(tree),
          digest=ocp.args.JsonRestore(),
        ),
      )
      differing = _differing(_digest(found["state"]), found["digest"])
    except Exception as error:  # Orbax raises what TensorStore gives it
      raise self._unreadable(step, _first_line(error)) from error
    if differing:
      raise self._unreadable(step, f"damaged arrays {', '.join(differing)}")
    return dataclasses.replace(like, **found["state"])

  def _unreadable(self, step, reason):
    return Unreadable(
      f"checkpoint {self._folder / str(step)} cannot be read: {reason};"
      " train.py sets it aside and goes on from the one before it",
      reason,
    )


class Unreadable(ValueError):
  """A checkpoint that is damaged."""

  def __init__(self, message, reason):
    super().__init__(message)
    self.reason = reason


@dataclasses.dataclass(frozen=True)
class _Best:
  """Preserves the checkpoints of the lowest validations."""

  folder: pathlib.Path
  number: int

  def should_preserve(self, checkpoints, *, context):
    del context
    bits = {}
    for info in checkpoints:
      found = _read_about(self.folder, info.step).get("validation")
      if found is not None:
        bits[info.step] = found
    best = sorted(bits, key=lambda step: (bits[step], step))[: self.number]
    return [info.step in best for info in checkpoints]


def _add_files(folder, paths):
  """Adds files of a checkpoint, with their CRC-32, to its list of files."""
  listed = folder / FILES
  files = json.loads(listed.read_text()) if listed.exists() else {}
  for path in sorted(paths):
    if path.is_file() and path != listed:
      files[str(path.relative_to(folder))] = zlib.crc32(path.read_bytes())
  atomic.write_text(listed, json.dumps(files))


def _read_about(folder, step):
  """What a checkpoint says of its run; {} of one that says nothing."""
  try:
    return json.loads((folder / str(step) / "about" / "metadata").read_text())
  except (OSError, ValueError):
    return {}


def _describe(digest):
  return ", ".join(f"{name} {value}" for name, value in digest.items())


def _as_tree(state):
  """Nested dicts, lists and arrays: what Orbax keeps without our classes."""
  return {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}


def _first_line(error):
  return str(error).split("\n")[0][:200]


def _shapes(tree):
  """The shape of each array by its path, as Orbax spells it."""
  keystr = functools.partial(jax.tree_util.keystr, simple=True, separator=".")
  return {
    keystr(path): tuple(x.shape)
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _digest(tree):
  """CRC-32 of the bytes of each array, by its path."""
  return {
    jax.tree_util.keystr(path): zlib.crc32(np.ascontiguousarray(x))
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def _differing(found, expected):
  names = found.keys() | expected.keys()
  return sorted(n for n in names if found.get(n) != expected.get(n))
