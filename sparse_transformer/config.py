"""The config of an experiment: defaults, changes, reading, writing."""

import ast
import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Collection, Mapping
from typing import Any, get_args

from ml_collections import ConfigDict

from sparse_transformer import atomic, schema
from sparse_transformer.schema import Affects, Config

# Policies: which fields of two configs may differ, by what these affect. They
# are for a run that resumes, for one that does with --allow_changes, and for
# commands that read a run.
Allowed = Collection[Affects]
TO_RESUME: Allowed = ("nothing", "machine")
WITH_ALLOW_CHANGES: Allowed = (*TO_RESUME, "updates", "scores")
TO_READ: Allowed = (*WITH_ALLOW_CHANGES, "start", "rounding")
# The same for commands that are given other data than the run's.
TO_READ_OTHER_DATA: Allowed = (*TO_READ, "data")
# The fields that leave the scores of given weights as they are.
UNSCORED: Allowed = (*TO_RESUME, "start", "updates")
ANY: Allowed = get_args(Affects)
Changes = dict[str, tuple[Any, Any]]  # {"group.field": (old, new)}
CHANGES = "config_changes.jsonl"
# All that `ast.literal_eval` raises for a text that is no literal.
UNREADABLE = ValueError, TypeError, SyntaxError, MemoryError, RecursionError


def get_config() -> ConfigDict:
  """The defaults of all fields, see `schema.Config`."""
  return ConfigDict(Config().to_dict())


def portable(config: Config) -> Config:
  """A copy of a config for any machine.

  The fields that name paths, devices or another run have their defaults.
  """
  names = [x for x in schema.FIELDS if schema.affects(x) == "machine"]
  names.append("train.init_from")
  return config.replace(**{x: schema.FIELDS[x].default for x in names})


def with_texts(config: Any, texts: Mapping[str, str]) -> Config:
  """A copy of a config in which some fields have other values.

  Args:
    config: a `Config` or ConfigDict.
    texts: {"group.field": value as text}, as flags give them.

  Raises ValueError as `schema.Config.replace` does.
  """
  # A text that is not a Python literal stays a text, and the rule of the field
  # rejects it.
  values: dict[str, Any] = {**texts}
  for field, text in texts.items():
    if schema.FIELDS[field].type is not str:
      with contextlib.suppress(*UNREADABLE):
        values[field] = ast.literal_eval(text)

  return schema.typed(config).replace(**values)


def overrides(preset: Any, config: Any) -> list[str]:
  """The flags that turn a `Config` or ConfigDict into another."""
  changes = compare(schema.typed(preset), schema.typed(config))
  return [f"--config.{name}={new}" for name, (_, new) in changes.items()]


def read_config(workdir: str | os.PathLike) -> Config:
  """Reads the config of a run; fields newer than the run have their defaults.

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
  """The config that a run wrote as JSON.

  Args:
    settings: {group: {field: value}}; fields that it lacks have defaults.
    place: where it was read, for the error.

  Raises ValueError if it has unknown fields, or values that are not allowed.
  """
  try:
    groups = settings.values() if isinstance(settings, dict) else ()
    if not groups or not all(isinstance(group, dict) for group in groups):
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
  """Writes the config of a run to its workdir, and what has changed.

  Args:
    workdir: the folder of the run, which is created.
    config: the config with which it goes on.
    step: the step from which it goes on.
    changes: what differs from the config of that step's checkpoint. They become
      the last line of config_changes.jsonl, in place of what was recorded at
      that step or a later one, and are printed on standard error if new.
  """
  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)

  # Changes at later steps do not count for a run that resumes before them.
  recorded = read_changes(workdir)
  kept = [(number, x) for number, x in recorded if number < step]
  if changes:
    kept.append((step, changes))
  text = ""
  for number, fields in kept:
    text += json.dumps(dict(step=number, changes=fields)) + "\n"

  path = folder / CHANGES
  before = path.read_text() if path.exists() else ""
  if before != text:
    atomic.write_text(path, text)
    for name, (old, new) in (changes or {}).items():
      print(f"{name} was {old!r}, is {new!r} from now on", file=sys.stderr)

  atomic.write_json(folder / "config.json", config.to_dict(), indent=2)


def read_changes(workdir: str | os.PathLike) -> list[tuple[int, Changes]]:
  """Reads the changes of a run's config, each with the step that it follows.

  Raises ValueError if config_changes.jsonl is damaged.
  """
  path = pathlib.Path(workdir) / CHANGES
  if not path.exists():
    return []

  lines = atomic.read_json(path, lines=True)
  changes = []
  try:
    for line in lines:
      fields = {}
      for name, (old, new) in line["changes"].items():
        fields[name] = old, new
      changes.append((int(line["step"]), fields))
    return changes
  except (TypeError, ValueError, KeyError, AttributeError) as error:
    raise ValueError(f"{path} cannot be read: {error}") from None


def compare(
  before: Config,
  after: Config,
  allowed: Allowed = ANY,
  place: object = "",
) -> Changes:
  """Compares two configs.

  Args:
    before: the config of a run.
    after: another one.
    allowed: what fields that differ may affect.
    place: where `before` was read, for the error.

  Returns:
    {"group.field": (old, new)} of the fields that differ.

  Raises ValueError if a field affects what is not allowed.
  """
  old = schema.flatten(before)
  new = schema.flatten(after)
  changes = {x: (old[x], new[x]) for x in sorted(old) if old[x] != new[x]}

  refused = [x for x in changes if schema.affects(x) not in allowed]
  if refused:
    values = [f"{x} ({old[x]!r} there, {new[x]!r} now)" for x in refused]
    can_change = all(schema.affects(x) in WITH_ALLOW_CHANGES for x in refused)
    raise ValueError(
      f"{place} is from a run with another config: {', '.join(values)}; use"
      f" {'--allow_changes, ' * can_change}another --workdir, or the same"
      " settings"
    )

  return changes
