"""The config of an experiment: defaults, changes, reading, writing."""

import ast
import json
import os
import pathlib
import sys
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import atomic, schema
from sparse_transformer.schema import Config

# Fields that a result does not depend on: how a run computes and what it logs
# and keeps. They may change when it resumes.
FREE_FIELDS = (
  *("attention.backend", "attention.tile", "checkpoint.", "data.path"),
  *("eval.batch_size", "eval.every", "eval.samples", "mesh.", "model.remat"),
  *("train.log_every", "train.nonfinite", "train.max_skipped"),
)
# Those that --allow_changes also lets change: they apply from now on.
CHANGEABLE = (
  *(f"attention.{x}" for x in schema.Attention().keys()),
  *("eval.sequences", "train.steps", "train.batch_size", "train.accumulation"),
  *(f"optimizer.{x}" for x in schema.Optimizer().keys() if x != "name"),
)
# Those that change no score, and all that an evaluation may change.
UNSCORED_FIELDS = (
  *("attention.backend", "attention.schedule", "attention.tile", "checkpoint."),
  *("data.path", "eval.", "loss.", "mesh.", "model.dropout", "model.remat"),
  *("optimizer.", "train."),
)
FREE_IN_EVALUATION = (*UNSCORED_FIELDS, "attention.", "model.dtype")
# Fields of earlier versions, each with the value that is now fixed, or None if
# it affected no result.
RETIRED = {
  **{"data.field": "text", "data.min_length": 500, "model.init": "code"},
  **{"model.pool": "mean", "model.experts_per_token": 2},
  **{"model.experts_every": 2, "attention.tile": 0, "loss.load_balance": 0.01},
  **{"loss.router_z": 0.001, "loss.codebook": 0.01, "loss.span": 1e-6},
  **{"optimizer.epsilon": 1e-8, "optimizer.clip_norm": 1.0},
  **{"train.max_skipped": None, "train.spike": None},
  **{"checkpoint.keep_best": None, "checkpoint.on_error": None},
}
Changes = dict[str, tuple[Any, Any]]
CHANGES = "config_changes.jsonl"


def get_config() -> ConfigDict:
  """Returns the defaults of all fields, see `schema.Config`."""
  return ConfigDict(schema.Config().to_dict())


def with_values(config: ConfigDict, **values: object) -> ConfigDict:
  """A copy of a config in which fields, "group.field", have other values.

  A string is converted to the type of the field.

  Raises:
    ValueError: a value is not of that type.
  """
  changed = ConfigDict(config.to_dict()).lock()
  for field, text in values.items():
    group, name = field.split(".")
    old, value = config[group][name], text
    try:
      if isinstance(text, str) and not isinstance(old, str):
        value = ast.literal_eval(text)
      changed.update_from_flattened_dict({field: value})
    except (TypeError, ValueError, SyntaxError, MemoryError, RecursionError):
      kind = type(old).__name__
      raise ValueError(f"{field}={text} must be of type {kind}") from None
  return changed


def overrides(preset: ConfigDict, config: ConfigDict) -> list[str]:
  """The flags that turn one config into another."""
  before, after = schema.flatten(preset), schema.flatten(config)
  return [f"--config.{x}={y}" for x, y in after.items() if y != before[x]]


def in_float32(config: Config | ConfigDict) -> Config:
  """A copy of a config whose activations are float32, as for final scores.

  Rounding to bfloat16 may shift bits by as much as published results differ.
  """
  return schema.typed(config).replace(**{"model.dtype": "float32"})


def read_config(workdir: str | os.PathLike) -> Config:
  """Returns the config of a run; newer fields have their defaults.

  Raises:
    FileNotFoundError: the workdir holds no run.
    ValueError: its config.json cannot be read.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{workdir} is not a run: it has no config.json; --workdir must name a"
      " folder that train.py wrote"
    )
  return from_json(atomic.read_json(path), path)


def from_json(settings: dict[str, Any], place: object) -> Config:
  """The config that a run has written, of this or an earlier version.

  Raises:
    ValueError: it is none, or cannot be continued by this version; the message
      begins with `place`.
  """
  try:
    values = schema.flatten(ConfigDict(settings))
    if not values:
      raise ValueError("it has no groups of fields, as a run writes")
    if values.get("model.task") == "generate":
      values.pop("model.pool", None)  # of classifiers
    for name, value in RETIRED.items():
      if name not in schema.FIELDS and value in (None, values.get(name)):
        values.pop(name, None)
    return Config().replace(**values)
  except (TypeError, ValueError, AttributeError) as error:
    raise ValueError(f"{place} cannot be read: {error}") from None


def write_config(
  workdir: str | os.PathLike,
  config: Config,
  step: int = 0,
  free: tuple[str, ...] = FREE_FIELDS,
) -> None:
  """Writes the config of a run to its workdir.

  Changes to the previous config are appended to config_changes.jsonl, with the
  step from which they apply, and printed on standard error.

  Raises:
    ValueError: see `check_config`.
  """
  changes = check_config(workdir, config, free)
  path = pathlib.Path(workdir) / "config.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  if changes:
    before = path.parent / CHANGES
    text = before.read_text() if before.exists() else ""
    line = json.dumps({"step": step, "changes": changes}) + "\n"
    atomic.write_text(before, text + line)
    for name, (old, new) in changes.items():
      print(f"{name} was {old!r}, is {new!r} from now on", file=sys.stderr)
    if {*_in_result(changes)} - {"eval.sequences"}:
      line = "the weights now differ from a run with these settings throughout"
      if "train.batch_size" in changes:
        line += ", and examples of this epoch may come again or be left out"
      print(line, file=sys.stderr)
  atomic.write_json(path, config.to_dict(), indent=2)


def _in_result(changes: Changes) -> list[str]:
  """The changed fields that a result depends on."""
  return [name for name in changes if not name.startswith(FREE_FIELDS)]


def check_finished(workdir: str | os.PathLike, changes: Changes) -> None:
  """Raises ValueError if changes would only relabel a run with no step left."""
  if names := _in_result(changes):
    raise ValueError(
      f"{', '.join(names)} cannot change: the run in {workdir} has no step left"
      " that would use it; set more train.steps, or use another --workdir"
    )


def check_config(
  workdir: str | os.PathLike,
  config: Config,
  free: tuple[str, ...] = FREE_FIELDS,
) -> Changes:
  """Checks that the run in a workdir, if there is one, can resume.

  Returns {"group.field": (old, new)} for the fields that differ.

  Raises:
    ValueError: one of them is not free to change.
  """
  if not (pathlib.Path(workdir) / "config.json").exists():
    return {}
  return check_changes(workdir, read_config(workdir), config, free)


def check_changes(
  place: object,
  before: Config,
  after: Config,
  free: tuple[str, ...] = FREE_FIELDS,
) -> Changes:
  """`check_config` with the config of a place, and other free fields."""
  old, new = schema.flatten(before), schema.flatten(after)
  changes = {
    name: (old.get(name), new.get(name))
    for name in sorted(old.keys() | new.keys())
    if old.get(name) != new.get(name)
  }
  differing = {
    name: f"{name} ({old!r} there, {new!r} now)"
    for name, (old, new) in changes.items()
    if not name.startswith(free)
  }
  if differing:
    may = "--allow_changes, " if differing.keys() <= {*CHANGEABLE} else ""
    raise ValueError(
      f"{place} is from a run with another config:"
      f" {', '.join(differing.values())}; use {may}another --workdir, or the"
      " same settings"
    )
  return changes
