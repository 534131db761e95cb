"""Configs: the values of fields, reading, writing, comparing."""

import json
import math
import re

import numpy as np
import pytest
from helpers import runs
from helpers.errors import refused

from sparse_transformer import config as config_lib, schema

# Wrong for every field whose default is of this type.
WRONG = {
  bool: (None, 0, 1, "True", (True,)),
  str: (None, 5, True, b"x", ("x",)),
  tuple: (None, 1, "1", (-1,), ("a", "b", "a"), (1, 0.5, True), {}),
  int: (
    None,
    "many",
    0.5,
    4.0,
    True,
    math.nan,
    (1,),
    np.int64(1),
    -2,
    2**32,
    2**70,
    10**30,
  ),
  float: (
    None,
    "1",
    True,
    (1.0,),
    np.float32(1),
    math.nan,
    math.inf,
    -math.inf,
    -1.0,
    -1,
    -1e-9,
    1e39,
    10**40,
  ),
}


def error(field, value):
  """What a wrong value of a field is answered."""
  with pytest.raises(ValueError) as caught:
    schema.check_value(field, value)
  message = str(caught.value)
  assert "\n" not in message
  assert len(message) < 300
  return message


def test_values_of_a_wrong_type_or_size_are_rejected():
  for name, field in schema.FIELDS.items():
    for value in WRONG[type(field.default)]:
      message = error(name, value)
      assert message.startswith(f"{name}="), value
      text = field.metadata["rule"].text
      assert message.endswith(f" must be {text}"), value

  for name, value in (
    ("optimizer.ema_decay", 1.5),
    ("model.num_heads", 10_001),
    ("attention.cycle", (0, 1.0)),
    ("mesh.data", 0),
  ):
    assert error(name, value).startswith(f"{name}={value}")


def test_values_at_the_edge_are_accepted():
  for field, value in (
    ("optimizer.learning_rate", 1),  # an integer for a number
    ("optimizer.ema_decay", 1.0),
    ("model.num_layers", 10_000),
    ("train.seed", 2**32 - 1),
    ("train.steps", 0),
    ("mesh.data", -1),
    ("attention.cycle", (1, 0)),
    ("attention.pattern", "Local(8)"),  # its names are checked elsewhere
    ("data.columns", 2000),  # more than there are positions
    ("data.fractions", (0.5, 0.25, 0.25)),
  ):
    schema.check_value(field, value)


def test_unknown_fields_are_rejected_and_missing_ones_have_their_defaults():
  config = config_lib.get_config()
  del config.train.steps
  del config.checkpoint
  assert schema.typed(config) == schema.Config()
  config.train.stepps = 5
  message = "no field 'train.stepps'; .* all; did you mean train.steps"
  with refused(message):
    schema.typed(config)


def test_integer_may_be_written_as_a_float():
  config = runs.tiny()
  config.unlock()
  config.train = dict(config.train, steps=1e3)
  steps = schema.typed(config).train.steps
  assert steps == 1000
  assert type(steps) is int
  varied = config_lib.with_texts(runs.tiny(), {"train.batch_size": "1e1"})
  assert varied.train.batch_size == 10


def test_config_is_read_with_the_types_it_was_written_with(tmp_path):
  cycle = (1, 0)
  fractions = (0.5, 0.3, 0.2)
  config = runs.tiny(
    **{
      "attention.cycle": cycle,
      "data.fractions": fractions,
    }
  )
  config_lib.write_config(tmp_path / "a" / "b", config)
  found = config_lib.read_config(tmp_path / "a" / "b")

  assert found.to_dict() == config.to_dict()
  assert found.attention.cycle == (1, 0)
  with pytest.raises(AttributeError):
    found.attention.pattern = "fixed"
  values = schema.flatten(found)
  for name, value in schema.flatten(config).items():
    assert type(values[name]) is type(value), name


def test_fields_that_a_config_lacks_have_their_defaults(tmp_path):
  config_lib.write_config(tmp_path, runs.tiny())
  path = tmp_path / "config.json"
  settings = json.loads(path.read_text())
  del settings["mesh"]["tensor"]
  path.write_text(json.dumps(settings))

  assert config_lib.read_config(tmp_path).to_dict() == runs.tiny().to_dict()

  settings["mesh"]["tensors"] = 1
  path.write_text(json.dumps(settings))

  with refused("config.json .* no field 'mesh.tensors'"):
    config_lib.read_config(tmp_path)


def another(name, value):
  """A valid value of a field that differs from a given one."""
  rule = schema.FIELDS[name].metadata["rule"]
  known = re.findall(r"\w+", rule.text.removeprefix("one of "))
  if rule.accepts(known[-1]):
    return known[known[0] == value]
  if isinstance(value, bool):
    return not value
  if isinstance(value, tuple):
    others = value[::-1], (1,), ("x",)
    return next(x for x in others if x != value and rule.accepts(x))
  if isinstance(value, float):
    return value / 2 + 0.25
  if isinstance(value, str):
    return "x"
  return next(x for x in range(value + 1, value + 4) if rule.accepts(x))


TINY = schema.typed(runs.tiny())
RESUMED = config_lib.TO_RESUME


def test_fields_may_change_by_what_they_affect():
  for name, value in schema.flatten(runs.tiny()).items():
    changed = schema.typed(runs.tiny(**{name: another(name, value)}))
    assert [*config_lib.compare(TINY, changed)] == [name]
    of = schema.affects(name)
    if of in ("nothing", "machine"):
      assert [*config_lib.compare(TINY, changed, RESUMED)] == [name]
      continue
    can = "--allow_changes, " if of in ("updates", "scores") else ""
    hint = f"^run is .* config: {name} .*; use {can}another --workdir"
    with pytest.raises(ValueError, match=hint):
      config_lib.compare(TINY, changed, RESUMED, "run")


def test_error_lists_all_fields_that_differ_with_both_values():
  fractions = (0.5, 0.25, 0.25)
  other = runs.tiny(**{"model.width": 32, "data.fractions": fractions})
  with pytest.raises(ValueError, match="use another --workdir") as error:
    config_lib.compare(TINY, schema.typed(other), RESUMED)
  assert "now), model.width (16 there, 32 now)" in str(error.value)
  assert "data.fractions ((0.9, 0.05, 0.05) there" in str(error.value)
