"""What each field of a config may be, in one table.

A run checks its config against the table before it reads data, compiles or
writes anything. What depends on several fields, on the data or on the devices
is checked where it is used, and so are the names of data sources, of patterns
and their modes, and of backends: other code can add to them.
"""

import dataclasses
import math
import operator
import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np
from ml_collections import ConfigDict, config_dict

# What the backward pass recomputes, from the least to the most.
REMATS = ("none", "attention", "block_but_attention", "block")
LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True)
class Rule:
  """What a field may be.

  Attributes:
    text: the end of the error message "... must be ...".
    accepts: whether a value is allowed.
  """

  text: str
  accepts: Callable[[Any], bool]


def number(**bounds: float) -> Rule:
  """A float or an integer that is finite, and within the bounds, as float32.

  Devices compute in float32, in which 0.99999999 is 1.

  Args:
    **bounds: any of `at_least`, `above`, `at_most`, `below`.
  """

  def accepts(value):
    if not isinstance(value, float | int) or isinstance(value, bool):
      return False
    return abs(value) <= LARGEST and _within(np.float32(value), bounds)

  return Rule(_bounded("a finite number", bounds), accepts)


def or_infinite(rule: Rule) -> Rule:
  """What a rule allows, or infinity, which switches a limit off."""
  return Rule(
    f"{rule.text}, or infinite",
    lambda value: value == math.inf or rule.accepts(value),
  )


def integer(at_least: int, *, below: int = 2**31) -> Rule:
  """An integer within the bounds; devices count in 32 bits."""
  bounds = dict(at_least=at_least, below=below)

  def accepts(value):
    return type(value) is int and _within(value, bounds)

  return Rule(_bounded("an integer", bounds), accepts)


def name(*known: str) -> Rule:
  """One of the known names."""
  return Rule(
    f"one of {', '.join(known)}",
    lambda value: isinstance(value, str) and value in known,
  )


def items(rule: Rule, count: int | None = None) -> Rule:
  """A tuple or a list whose items follow a rule, of any length by default."""

  def accepts(value):
    return (
      isinstance(value, tuple | list)
      and count in (None, len(value))
      and all(map(rule.accepts, value))
    )

  size = "" if count is None else f" of {count} items"
  return Rule(f"a tuple{size}, each {rule.text}", accepts)


_COMPARE = dict(
  at_least=operator.ge,
  above=operator.gt,
  at_most=operator.le,
  below=operator.lt,
)


def _within(value, bounds):
  return all(_COMPARE[name](value, bound) for name, bound in bounds.items())


def _bounded(kind, bounds):
  words = [f"{k.replace('_', ' ')} {bound:,}" for k, bound in bounds.items()]
  return " ".join([kind, " and ".join(words)]).strip()


TEXT = Rule("a string", lambda value: isinstance(value, str))
SWITCH = Rule("True or False", lambda value: isinstance(value, bool))
# A network has a Python object for each head of each layer. Published networks
# have about a hundred layers, and as many heads.
AMOUNT = integer(1, below=10_001)
POSITIVE, NOT_NEGATIVE = number(above=0), number(at_least=0)
FRACTION = number(at_least=0, below=1)
DEVICES = Rule(
  "an integer at least 1, or -1 for all devices that are left",
  lambda value: integer(-1).accepts(value) and value != 0,
)

RULES: dict[str, Rule] = {
  "data.name": TEXT,
  "data.path": TEXT,
  "data.length": integer(1),
  "data.columns": integer(1),  # above the length: one row
  "data.fractions": items(number(above=0, below=1), 3),
  "data.rate": integer(1, below=1_000_001),  # above any sound's
  "model.num_layers": AMOUNT,
  "model.num_heads": AMOUNT,
  "model.width": integer(1),
  "model.half_size": SWITCH,
  "model.dropout": FRACTION,
  "model.init": name("code", "paper"),
  "model.token_std": NOT_NEGATIVE,
  "model.position_std": NOT_NEGATIVE,
  "model.dtype": name("float32", "bfloat16", "float16"),
  "model.remat": name(*REMATS),
  "model.experts": integer(0, below=10_001),
  "model.experts_per_token": AMOUNT,
  "model.experts_every": AMOUNT,
  "attention.pattern": TEXT,
  "attention.mode": TEXT,
  "attention.cycle": items(integer(0)),
  "attention.stride": integer(1),
  "attention.window": integer(1),
  "attention.width": integer(1),
  "attention.num_summaries": integer(1),
  "attention.backend": TEXT,
  "attention.tile": integer(0),
  "loss.load_balance": NOT_NEGATIVE,
  "loss.router_z": NOT_NEGATIVE,
  "loss.codebook": NOT_NEGATIVE,
  "loss.span": NOT_NEGATIVE,
  "optimizer.name": name("adamw", "muon"),
  "optimizer.learning_rate": NOT_NEGATIVE,
  "optimizer.adam_learning_rate": NOT_NEGATIVE,
  "optimizer.warmup_steps": integer(0),
  "optimizer.beta1": FRACTION,
  "optimizer.beta2": FRACTION,
  "optimizer.epsilon": POSITIVE,  # at 0, weights without gradients become nan
  "optimizer.weight_decay": NOT_NEGATIVE,
  "optimizer.clip_norm": or_infinite(POSITIVE),  # at 0 nothing is learned
  "optimizer.ema_decay": number(at_least=0, at_most=1),
  # JAX ignores the upper bits of larger seeds.
  "train.seed": integer(0, below=2**32),
  "train.steps": integer(0),
  "train.batch_size": integer(1),
  "train.accumulation": integer(1),
  "train.log_every": integer(0),
  "train.nonfinite": name("stop", "skip"),
  "train.max_skipped": integer(0),
  "train.spike": or_infinite(NOT_NEGATIVE),
  "eval.every": integer(0),
  "eval.batch_size": integer(1),
  "eval.sequences": integer(0),
  "checkpoint.every": integer(0),
  "checkpoint.keep": integer(1),
  "checkpoint.keep_best": integer(0),
  "checkpoint.on_error": name("stop", "continue"),
  **dict.fromkeys(
    ("mesh.data", "mesh.fsdp", "mesh.sequence", "mesh.tensor"), DEVICES
  ),
}


def check(config: ConfigDict) -> None:
  """Checks that a config has exactly the fields it should, with valid values.

  Raises:
    ValueError: it has not; the message names fields, values and rules.
  """
  values = _flatten(config)
  problems = [
    f"{verb} {', '.join(fields[:3])}{' ...' if len(fields) > 3 else ''}"
    for verb, fields in (
      ("lacks", [field for field in RULES if field not in values]),
      ("has unknown", [field for field in values if field not in RULES]),
    )
    if fields
  ]
  if problems:
    raise ValueError(
      f"the config {' and '.join(problems)}; configs/default.py has all fields"
    )
  for field, value in values.items():
    check_value(field, value)


def check_value(field: str, value: object) -> None:
  """Raises ValueError unless a field, "group.name", may have this value."""
  if not RULES[field].accepts(value):
    raise ValueError(f"{field}={_shown(value)} must be {RULES[field].text}")


def fields(group: str) -> list[str]:
  """The names of the fields of a group."""
  names = (field.split(".") for field in RULES)
  return [name for prefix, name in names if prefix == group]


def _flatten(config: ConfigDict) -> dict[str, Any]:
  """{"group.name": value}; what is outside a group has its own name."""
  if not isinstance(config, ConfigDict):
    raise ValueError(
      f"the config is of type {type(config).__name__}, but must be a ConfigDict"
      " with the fields of configs/default.py"
    )
  try:
    groups = config.to_dict()
  except config_dict.RequiredValueError:
    raise ValueError("a required field of the config has no value") from None
  values: dict[str, Any] = {}
  for group, content in groups.items():
    # An empty group has its own name, too, unless it is known.
    if isinstance(content, dict) and (content or fields(group)):
      values |= {f"{group}.{name}": value for name, value in content.items()}
    else:
      values[group] = content
  return values


def _shown(value: object) -> str:
  """A value as in Python, shortened."""
  try:
    return reprlib.repr(value)
  except ValueError:  # Python prints no integers of thousands of digits
    return "(a number of thousands of digits)"
