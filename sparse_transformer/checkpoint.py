"""Checkpoints of a run: save, verify, restore. Thin over Orbax.

A workdir holds `config.json` and `checkpoints/<step>/`. Beside the state
stands a digest of each array: Orbax restores flipped bytes without a word,
so what is read back is checked against it.
"""

import dataclasses
import functools
import json
import pathlib
import zlib

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from configs import default

GROUPS = (
  "data",
  "model",
  "attention",
  "optimizer",
  "train",
  "eval",
  "checkpoint",
)
FILES = "files.json"
# Fields that change how a run is carried out, not what it computes.
FREE_FIELDS = (
  "data.path",
  "model.remat",
  "attention.backend",
  "attention.tile",
  "train.log_every",
  "eval.",
  "checkpoint.",
)


def write_config(workdir, config):
  """Puts the config into a workdir, or checks that it is the one there."""
  path = pathlib.Path(workdir) / "config.json"
  if path.exists():
    old, new = (_flatten(c) for c in (read_config(workdir), config))
    differing = [
      f"{name} ({old.get(name)!r} there, {new.get(name)!r} now)"
      for name in sorted(old.keys() | new.keys())
      if old.get(name) != new.get(name) and not name.startswith(FREE_FIELDS)
    ]
    if differing:
      raise ValueError(
        f"{workdir} holds a run of another config: {', '.join(differing)};"
        " use another --workdir, or the same settings"
      )
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(config.to_dict(), indent=2) + "\n")


def read_config(workdir):
  """The config of a run, from its workdir alone.

  A field that is younger than the run has its default.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{workdir} is no run: it has no config.json; --workdir must name a"
      " folder that train.py wrote"
    )
  try:
    settings = json.loads(path.read_text())
    defaults = default.get_config().to_dict()
    # JSON has no tuples.
    groups = {
      group: ConfigDict(
        {
          name: tuple(value) if isinstance(value, list) else value
          for name, value in (defaults[group] | settings[group]).items()
        }
      )
      for group in GROUPS
    }
  except (ValueError, TypeError, KeyError, AttributeError) as error:
    raise ValueError(
      f"{path} cannot be read: {type(error).__name__}: {error}"
    ) from error
  return ConfigDict(groups).lock()


def _flatten(config):
  """{"group.field": value} of a config, with tuples as JSON gives them."""
  return {
    f"{group}.{name}": list(value) if isinstance(value, tuple) else value
    for group, fields in config.to_dict().items()
    for name, value in fields.items()
  }


class Checkpoints:
  """The checkpoints of a workdir. Saving goes on in the background."""

  def __init__(self, workdir, *, keep=None):
    """keep: how many of the last ones stay; None only reads."""
    writes = keep is not None
    self._folder = pathlib.Path(workdir).absolute() / "checkpoints"
    if writes:
      self._clear()
    self._manager = ocp.CheckpointManager(
      self._folder,
      item_handlers={
        "state": ocp.StandardCheckpointHandler(),
        "digest": ocp.JsonCheckpointHandler(),
      },
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=writes,
        # A reader would delete what a run beside it is writing.
        cleanup_tmp_directories=writes,
        async_options=ocp.AsyncOptions(
          post_finalization_callback=self._write_files
        ),
      ),
    )

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._manager.close()

  def _clear(self):
    """Removes empty folders of steps: Orbax would not save up to there."""
    for folder in self._folder.glob("[0-9]*"):
      if folder.name.isdigit() and not (folder / "digest").exists():
        try:
          folder.rmdir()
        except OSError as error:
          raise self._unreadable(folder.name, "it has no digest") from error

  def _write_files(self):
    """Puts a list of its files into the checkpoint that is being finished.

    It is checked first: at a damaged file Orbax gives up its other reads,
    and each of them fills the terminal.
    """
    unfinished = self._folder.glob("*.orbax-checkpoint-tmp*")
    folder = max(unfinished, key=lambda path: path.stat().st_mtime)
    files = {
      str(path.relative_to(folder)): zlib.crc32(path.read_bytes())
      for path in sorted(folder.glob("*/**/*"))
      if path.is_file()
    }
    (folder / FILES).write_text(json.dumps(files))

  def _damaged_files(self, step):
    folder = self._folder / str(step)
    if not (folder / FILES).exists():  # then the digest of the arrays decides
      return []
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

  def save(self, state):
    step = int(state.step)
    if step in self.steps():
      return
    tree = _as_tree(state)
    saved = self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(tree),
        digest=ocp.args.JsonSave(_digest(tree)),
      ),
    )
    assert saved, f"Orbax did not save step {step}"

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
    return ValueError(
      f"checkpoint {self._folder / str(step)} cannot be read: {reason};"
      " move that folder away to use the checkpoint before it"
    )


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
