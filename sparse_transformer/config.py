"""The config of an experiment: defaults, changes, reading, writing."""

import ast
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import atomic, schema
from sparse_transformer.schema import Config

# What fields affect, by the beginnings of their names; the first that fits
# holds. All others are what the network is, and what it is trained on.
AFFECTS = {
  "nothing": (  # how a run computes, logs and keeps
    *("attention.backend", "attention.check", "checkpoint.", "data.path"),
    *("eval.batch_size", "eval.every", "eval.samples", "mesh."),
    *("model.remat", "train.log_every"),
  ),
  # No score of given weights, only how they come about: from the first step
  # on, or from any step.
  "start": (
    *("model.dropout", "model.position_std", "model.token_std"),
    *("optimizer.name", "train.init_", "train.seed"),
  ),
  "updates": ("eval.sequences", "optimizer.", "train."),
  "updates and scores": ("attention.",),
  "rounding": ("model.dtype",),
  "data": (
    "data.fractions",
    "data.name",
    "data.splits",
  ),  # with other data than the run's
}
# Fields that may differ if a run resumes, if it does so with --allow_changes,
# and if it is evaluated; the last two tell how scores differ.
FREE = {"nothing"}
CHANGEABLE = {"nothing", "updates", "updates and scores"}
UNSCORED = {"nothing", "start", "updates"}
FREE_IN_EVALUATION = {*AFFECTS} - {"data"}
# Paths and devices, which another machine does not have.
OF_MACHINE = "attention.backend", "data.path", "mesh.", "train.init_from"
Changes = dict[str, tuple[Any, Any]]
CHANGES = "config_changes.jsonl"
# What `ast.literal_eval` raises.
UNREADABLE = ValueError, TypeError, SyntaxError, MemoryError, RecursionError


def get_config() -> ConfigDict:
  """The defaults of all fields, see `schema.Config`."""
  return ConfigDict(Config().to_dict())


def affects(field: str) -> str:
  """The key of `AFFECTS` that holds for a field, or "all"."""
  found = (x for x, names in AFFECTS.items() if field.startswith(names))
  return next(found, "all")


def portable(config: Config) -> Config:
  """A config for any machine: its fields `OF_MACHINE` have their defaults."""
  names = (name for name in schema.FIELDS if name.startswith(OF_MACHINE))
  return config.replace(**{name: schema.FIELDS[name].default for name in names})


def with_texts(config: Any, texts: Mapping[str, str]) -> Config:
  """A config in which fields, "group.field", have the values of texts.

  Raises ValueError as `schema.Config.replace` does.
  """
  values: dict[str, Any] = {**texts}
  for field, text in texts.items():
    if schema.FIELDS[field].type is not str:
      with contextlib.suppress(*UNREADABLE):
        values[field] = ast.literal_eval(text)
  return schema.typed(config).replace(**values)


def overrides(preset: Any, config: Any) -> list[str]:
  """The flags that turn a `Config` or ConfigDict into another."""
  before, after = (schema.flatten(schema.typed(x)) for x in (preset, config))
  return [f"--config.{x}={y}" for x, y in after.items() if y != before[x]]


def read_config(workdir: str | os.PathLike) -> Config:
  """The config of a run; newer fields have their defaults.

  Raises ValueError or OSError if the workdir holds none that can be read.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{workdir} is not a run: it has no config.json; --workdir must name a"
      f" folder that train.py wrote{atomic.nearest(path.parent)}"
    )
  return from_json(atomic.read_json(path), path)


def from_json(settings: dict[str, Any], place: object) -> Config:
  """The config that a run has written; fields that it lacks have defaults.

  Raises ValueError with `place` first if it has other fields or values.
  """
  try:
    groups = settings.values() if isinstance(settings, dict) else ()
    if {*map(type, groups)} != {dict}:
      raise ValueError("it lacks the groups of fields that a run writes")
    return Config().replace(**schema.flatten(ConfigDict(settings)))
  except (TypeError, ValueError, AttributeError) as error:
    raise ValueError(f"{place} cannot be read: {error}") from None


def write_config(
  workdir: str | os.PathLike,
  config: Config,
  step: int = 0,
  changes: Changes | None = None,
) -> None:
  """Writes the config of a run to its workdir.

  `changes` since the checkpoint of a step, from which the run goes on, become
  the last line of config_changes.jsonl, and are printed on standard error if
  they are new. They replace what was recorded at that step or a later one.
  """
  path = pathlib.Path(workdir) / "config.json"
  path.parent.mkdir(parents=True, exist_ok=True)
  before, changes = read_changes(workdir), changes or {}
  lines = [line for line in before if line[0] < step]
  lines += [(step, changes)] if changes else []
  text = _as_lines(lines)
  if text != _as_lines(before):
    atomic.write_text(path.parent / CHANGES, text)
    for name, (old, new) in changes.items():
      print(f"{name} was {old!r}, is {new!r} from now on", file=sys.stderr)
  atomic.write_json(path, config.to_dict(), indent=2)


def _as_lines(changes: list[tuple[int, Changes]]) -> str:
  return "".join(
    json.dumps(dict(step=step, changes=of_step)) + "\n"
    for step, of_step in changes
  )


def read_changes(workdir: str | os.PathLike) -> list[tuple[int, Changes]]:
  """The changes of a run's config, each with the step after which it holds."""
  path = pathlib.Path(workdir) / CHANGES
  lines = atomic.read_json(path, lines=True) if path.exists() else []
  try:
    return [
      (int(line["step"]), {x: (old, new) for x, (old, new) in pairs})
      for line in lines
      for pairs in [line["changes"].items()]
    ]
  except (TypeError, ValueError, KeyError, AttributeError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from None


def check_config(
  workdir: str | os.PathLike, config: Config, free: Collection[str] = FREE
) -> Changes:
  """{"group.field": (old, new)} of what differs from the run in a workdir.

  Raises ValueError if a field affects what is not free to change.
  """
  if not (pathlib.Path(workdir) / "config.json").exists():
    return {}
  return check_changes(workdir, read_config(workdir), config, free)


def check_changes(
  place: object, before: Config, after: Config, free: Collection[str] = FREE
) -> Changes:
  """`check_config` with the config of a place."""
  old, new = schema.flatten(before), schema.flatten(after)
  changes = {x: (old[x], new[x]) for x in sorted(old) if old[x] != new[x]}
  differing = [x for x in changes if affects(x) not in free]
  if differing:
    found = [f"{x} ({old[x]!r} there, {new[x]!r} now)" for x in differing]
    may = {*map(affects, differing)} <= CHANGEABLE
    raise ValueError(
      f"{place} is from a run with another config: {', '.join(found)}; use"
      f" {'--allow_changes, ' * may}another --workdir, or the same settings"
    )
  return changes
