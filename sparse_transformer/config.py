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

# Each policy lists what the fields in which two configs differ may affect:
# when a run resumes, when it resumes with --allow_changes, and when a command
# reads a run.
Allowed = Collection[Affects]
TO_RESUME: Allowed = ("nothing", "machine")
WITH_ALLOW_CHANGES: Allowed = (*TO_RESUME, "updates", "scores")
TO_READ: Allowed = (*WITH_ALLOW_CHANGES, "start", "rounding")
# For commands that read a run but are given data other than the run's.
TO_READ_OTHER_DATA: Allowed = (*TO_READ, "data")
# Fields that do not change the scores of given weights.
UNSCORED: Allowed = (*TO_RESUME, "start", "updates")
ANY: Allowed = get_args(Affects)
Changes = dict[str, tuple[Any, Any]]  # {"group.field": (old, new)}
CHANGES = "config_changes.jsonl"
# The errors that `ast.literal_eval` raises if its text is not a literal.
UNREADABLE = ValueError, TypeError, SyntaxError, MemoryError, RecursionError


def get_config() -> ConfigDict:
  """Returns the defaults of all fields, see `schema.Config`."""
  return ConfigDict(Config().to_dict())


def portable(config: Config) -> Config:
  """Returns a copy of a config that does not depend on the machine.

  Fields that name paths, devices or another run are reset to their defaults.
  """
  names = [x for x in schema.FIELDS if schema.affects(x) == "machine"]
  names.append("train.init_from")
  return config.replace(**{x: schema.FIELDS[x].default for x in names})


def with_texts(config: Any, texts: Mapping[str, str]) -> Config:
  """Returns a copy of a config in which some fields have other values.

  Args:
    config: a `Config` or ConfigDict.
    texts: {"group.field": value}, where values are text, as on the command
      line.

  Raises ValueError if a field is unknown or its value is not allowed.
  """
  # A value that is not a Python literal stays a string, and the rule of the
  # field then rejects it.
  values: dict[str, Any] = {**texts}
  for field, text in texts.items():
    if schema.FIELDS[field].type is not str:
      with contextlib.suppress(*UNREADABLE):
        values[field] = ast.literal_eval(text)

  return schema.typed(config).replace(**values)


def overrides(preset: Any, config: Any) -> list[str]:
  """Returns the flags that change the config `preset` into `config`.

  Args:
    preset: a `Config` or ConfigDict.
    config: the config that the flags produce, of either type.
  """
  changes = compare(schema.typed(preset), schema.typed(config))
  return [f"--config.{name}={new}" for name, (_, new) in changes.items()]


def read_config(workdir: str | os.PathLike) -> Config:
  """Reads the config of a run.

  Fields that were added after the run was made get their defaults.

  Raises ValueError or OSError if the workdir contains no readable config.
  """
  path = pathlib.Path(workdir) / "config.json"
  if not path.exists():
    raise FileNotFoundError(
      f"{workdir} is not a run: it has no config.json; --workdir must name a"
      f" folder that train.py wrote{atomic.nearest(path.parent)}"
    )

  return from_json(atomic.read_json(path), path)


def from_json(settings: dict[str, Any], place: object) -> Config:
  """Returns the config that a run wrote as JSON.

  Args:
    settings: {group: {field: value}}. Omitted fields get their defaults.
    place: how error messages refer to the input, such as its file name.

  Raises ValueError if `settings` includes unknown fields or values that are not
  allowed.
  """
  try:
    groups = settings.values() if isinstance(settings, dict) else ()
    if not groups or not all(isinstance(group, dict) for group in groups):
      raise ValueError("it is not a config of the form {group: {field: value}}")
    return Config().replace(**schema.flatten(ConfigDict(settings)))
  except (TypeError, ValueError, AttributeError) as error:
    raise ValueError(f"{place} cannot be read: {error}") from None


def write_config(
  workdir: str | os.PathLike,
  config: Config,
  step: int = 0,
  changes: Changes | None = None,
) -> None:
  """Writes the config of a run to its workdir, and records changes to it.

  Args:
    workdir: the folder of the run; created if it does not exist.
    config: the config with which the run continues.
    step: the step from which the run continues.
    changes: how `config` differs from the config of the checkpoint at `step`.
      They become the last line of config_changes.jsonl. Changes recorded
      earlier at `step` or later are deleted. Changes that were not recorded
      before are also printed on standard error.
  """
  folder = pathlib.Path(workdir)
  folder.mkdir(parents=True, exist_ok=True)

  # A run that resumes at `step` discards the changes recorded at later steps.
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
  """Reads how the config of a run has changed.

  Returns:
    A list of (step, changes), where the changes apply after this step.

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
    after: the config to compare with it.
    allowed: values of `schema.affects`. A field may differ only if everything
      that it affects is among them.
    place: where `before` was read, for the error message.

  Returns:
    {"group.field": (old, new)} for each field that differs.

  Raises ValueError if a field that differs affects something not in `allowed`.
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
      f" {'--allow_changes, ' * can_change}another --workdir, or the settings"
      " of that run"
    )

  return changes
