"""Tests of schema.py: the fields of a config and the values they may have."""

import math
import re
import subprocess
import sys
import time

import numpy as np
import pytest
import runs
from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, schema

# Wrong for every field whose default is of this type.
WRONG = {
  bool: (None, 0, 1, "True", (True,)),
  str: (None, 5, True, b"x", ("x",)),
  tuple: (None, 1, "1", (-1,), ("a", "b", "c"), (1, 0.5, True), {}),
  int: (
    *(None, "many", 0.5, 4.0, True, math.nan, (1,), np.int64(1)),
    *(-1, 2**32, 2**70, 10**30),
  ),
  float: (
    *(None, "1", True, (1.0,), np.float32(1), math.nan, math.inf, -math.inf),
    *(-1.0, -1, -1e-9, 1e39, 10**40),
  ),
}


def error(field, value):
  """What `check` says about the defaults with another value of a field."""
  settings, (group, name) = config_lib.get_config().to_dict(), field.split(".")
  settings[group][name] = value
  with pytest.raises(ValueError) as caught:
    schema.typed(ConfigDict(settings))
  message = str(caught.value)
  assert "\n" not in message and len(message) < 300
  return message


@pytest.mark.parametrize("field", schema.FIELDS)
def test_value_of_a_wrong_type_or_size_is_rejected(field):
  rule = schema.FIELDS[field].metadata["rule"]
  for value in WRONG[type(schema.FIELDS[field].default)]:
    if value == math.inf and "infinite" in rule.text:
      continue  # switches a limit off
    if value == -1 and "-1 for" in rule.text:
      continue  # the devices that are left
    message = error(field, value)
    assert message.startswith(f"{field}="), value
    assert message.endswith(f" must be {rule.text}"), value


@pytest.mark.parametrize(
  "field, value, message",
  [
    ("optimizer.ema_decay", 1.5, "ema_decay=1.5 .* at most 1"),
    ("model.num_heads", 10_001, "num_heads=10001 .* below 10,001"),
    ("attention.cycle", (0, 1.0), r"cycle=\(0, 1.0\) .* each item an integer"),
  ],
)
def test_value_that_makes_no_sense_is_rejected(field, value, message):
  assert re.search(message, error(field, value))


@pytest.mark.parametrize(
  "field, value",
  [
    ("optimizer.learning_rate", 1),  # an integer for a number
    ("optimizer.ema_decay", 1.0),
    ("model.num_layers", 10_000),
    ("train.seed", 2**32 - 1),
    ("train.steps", 0),
    ("optimizer.clip_norm", math.inf),  # does not clip
    ("attention.cycle", (1, 0)),
    ("attention.pattern", "Local(8)"),  # its names are checked elsewhere
    ("data.columns", 2000),  # more than there are positions
    ("data.fractions", (0.5, 0.25, 0.25)),
  ],
)
def test_value_at_the_edge_is_accepted(field, value):
  schema.check_value(field, value)


def test_unknown_fields_are_rejected_and_missing_ones_have_their_defaults():
  config = config_lib.get_config()
  del config.train.steps
  del config.checkpoint
  assert schema.typed(config) == schema.Config()
  config.train.stepps = 5
  message = "the config has no field train.stepps; docs/config.md lists all"
  with pytest.raises(ValueError, match=message):
    schema.typed(config)


def test_check_of_defaults_takes_less_than_a_millisecond_and_no_jax():
  config, times = config_lib.get_config(), []
  for _ in range(20):
    start = time.perf_counter()
    schema.typed(config)
    times.append(time.perf_counter() - start)
  assert min(times) < 1e-3
  script = (
    "import sys, sparse_transformer.schema; sys.exit('jax' in sys.modules)"
  )
  subprocess.run([sys.executable, "-c", script], cwd=runs.REPO, check=True)
