"""The field that a comparison varies, and its values."""

import ast
import re
import zlib

from ml_collections import ConfigDict

# Fields that a comparison sets itself, and the flag that says how.
SET_BY = {"train.seed": "seeds", "train.steps": "budget"}
MAX_NAME = 200  # bytes in the name of a folder; most file systems allow 255


def parse_vary(text: str, config: ConfigDict) -> tuple[str, list[str]]:
  """The field and its values in 'group.field=value,value'.

  Values are separated by commas outside brackets, or by semicolons.

  >>> from sparse_transformer.config import get_config
  >>> parse_vary("attention.pattern=dense,BigBird(8, 3)", get_config())
  ('attention.pattern', ['dense', 'BigBird(8, 3)'])

  Raises:
    ValueError: if the config has no such field, the comparison sets the field
      itself, or the values are not distinct.
  """
  field, _, values = text.partition("=")
  group, _, name = field.partition(".")
  if group not in config or name not in config[group]:
    raise ValueError(f"--vary={text}: --config has no field {field!r}")
  if flag := SET_BY.get(field):
    raise ValueError(
      f"--vary={text}: a comparison sets {field} itself; use --{flag}"
    )
  separator = r";" if ";" in values else r",(?![^()\[\]]*[)\]])"
  choices = [value.strip() for value in re.split(separator, values)]
  if not all(choices) or len({*choices}) < len(choices):
    raise ValueError(f"--vary={text} must give different values after {field}=")
  return field, choices


def with_values(config: ConfigDict, **values: object) -> ConfigDict:
  """A copy of the config in which fields, "group.field", have other values.

  A string is converted to the type of the field.

  Raises:
    ValueError: if a value is not of that type.
  """
  changed = ConfigDict(config.to_dict()).lock()
  for field, text in values.items():
    group, name = field.split(".")
    old, value = config[group][name], text
    if isinstance(text, str) and not isinstance(old, str):
      try:
        value = ast.literal_eval(text)
      except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(
          f"{field}={text} must be of type {type(old).__name__}"
        ) from None
    try:
      changed.update_from_flattened_dict({field: value})
    except (TypeError, ValueError) as error:
      raise ValueError(f"{field}={text}: {error}") from None
  return changed


def with_steps(config: ConfigDict, steps: int, field: str) -> ConfigDict:
  """The config of a run of so many steps, of which a tenth at most warm it up.

  Unless `field`, which varies, is the warm-up.
  """
  warmup_steps = config.optimizer.warmup_steps
  if field != "optimizer.warmup_steps":
    warmup_steps = min(warmup_steps, steps // 10)
  return with_values(
    config, **{"train.steps": steps, "optimizer.warmup_steps": warmup_steps}
  )


def folder_name(choice: str) -> str:
  """The name of a folder, a different one for each choice.

  >>> folder_name("local"), folder_name("Local(4) | Strided(4)")
  ('local', 'Local_4_Strided_4-14ae6e10')
  """
  name = re.sub(r"[^\w.=+-]+", "_", choice).strip("_")
  if name == choice and name.strip(".") and len(name.encode()) <= MAX_NAME:
    return name
  name = name.encode()[:MAX_NAME].decode(errors="ignore")
  return f"{name}-{zlib.crc32(choice.encode()):08x}"
