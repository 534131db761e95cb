"""The plan of a comparison: its runs, and the config of each."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from sparse_transformer import config as config_lib, machine, schema
from sparse_transformer.training import stopwatch

# The most values of a flag, each of which costs at least one run.
MAX_VALUES = 999
# The most bytes in the name of a folder; most file systems allow 255.
MAX_NAME = 200
# A comma outside brackets: every bracket that closes after it opens after it.
OUTSIDE = r",(?!(?:[^()\[\]]+|\([^()]*\))*+[)\]])"


class Budget(NamedTuple):
  """What is limited, and to how much."""

  kind: str  # "steps", "seconds" or "processor_seconds"
  amount: float


class Axis(NamedTuple):
  """A field that takes several values."""

  field: str  # "group.name"
  values: Sequence[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
  """The runs of a comparison: each value of an axis with each seed.

  Attributes:
    file: the config file.
    preset: what the config file says.
    config: the same with the changes of the command line.
    root: the comparison's folder.
    vary: what is compared; its values are called choices.
    budget: of each run.
    seeds: of the runs with each choice; tuning uses the next one.
    tune: what is tuned for each choice, if anything; its values are called
      candidates.
    tune_budget: of a run of tuning, if not the same.
    equal_keys: whether runs must have about as many keys per query.

  Raises:
    ValueError: the plan contradicts itself.
  """

  file: str
  preset: ConfigDict
  config: schema.Config
  root: pathlib.Path
  vary: Axis
  budget: Budget
  seeds: range
  tune: Axis | None = None
  tune_budget: Budget | None = None
  equal_keys: bool = False

  def __post_init__(self) -> None:
    # A value may set more than the axis: "dense with data.length=512".
    varied: set[str] = set()
    for choice in self.vary.values:
      varied |= assignments(self.vary.field, choice).keys()
    tuned = {self.tune.field} if self.tune else set()

    if twice := {"train.steps", "train.seed"} & (varied | tuned):
      raise ValueError(
        f"{min(twice)} cannot vary: --budget sets train.steps, and --seeds"
        " train.seed"
      )

    if self.tune and (tuned & varied or len(self.tune.values) == 1):
      raise ValueError(
        f"--tune={self.tune.field} must have at least 2 values, and be another"
        " field than --vary"
      )

    if self.tune_budget and not self.tune:
      raise ValueError("--tune_budget needs --tune")

  @property
  def choices(self) -> Sequence[str]:
    """The values that are compared."""
    return self.vary.values

  @property
  def tuning(self) -> list["Trial"]:
    """The runs of tuning: each choice with each candidate, and their own seed.

    No run that is compared has this seed, so that candidates are not chosen by
    the losses that are reported.
    """
    candidates = self.tune.values if self.tune else ()
    return [Trial(self, x, y) for y in candidates for x in self.choices]

  def final(self, best: Mapping[str, str]) -> list["Trial"]:
    """The runs that are compared: each choice with each seed.

    Args:
      best: the best candidate of each choice; empty without tuning.
    """
    # Seed by seed: a stopped comparison is about as far with every choice.
    pairs = itertools.product(self.seeds, self.choices)
    return [
      Trial(
        plan=self,
        choice=choice,
        candidate=best.get(choice, ""),
        seed=seed,
      )
      for seed, choice in pairs
    ]

  def about(self) -> dict[str, Any]:
    """What tells this comparison from others, as JSON.

    A folder belongs to one comparison: it is resumed only if its file says the
    same.
    """
    identity = dict(
      field=self.vary.field,
      choices=self.choices,
      budget=self.budget,
      seeds=len(self.seeds),
      first_seed=self.seeds.start,
      tune=self.tune,
      tune_budget=self.tune_budget,
      machine=machine.machine(),
      config=self.config.to_dict(),
    )

    # Tuples become lists, as in what is read back from the file.
    return json.loads(json.dumps(identity))


@dataclasses.dataclass(frozen=True)
class Trial:
  """A run of a comparison: its folder, and what it is trained with.

  Attributes:
    plan: the comparison.
    choice: its value of the field that is compared.
    candidate: its value of the tuned field; "" if none is tuned.
    seed: of a run that is compared; None for a run of tuning.
  """

  plan: Comparison
  choice: str
  candidate: str = ""
  seed: int | None = None

  def __str__(self) -> str:
    """The values of the fields that vary."""
    text = f"{self.plan.vary.field}={self.choice}"
    if self.plan.tune and self.candidate:
      text += f", {self.plan.tune.field}={self.candidate}"
    return text

  @property
  def workdir(self) -> pathlib.Path:
    """The folder of the run."""
    folder = self.plan.root / folder_name(self.choice)
    if self.seed is None:
      return folder / "tune" / folder_name(self.candidate)
    return folder / f"seed{self.seed}"

  @property
  def budget(self) -> Budget:
    """The budget of the run."""
    # Without a budget of its own, tuning has that of the other runs.
    tuning = self.plan.tune_budget if self.seed is None else None
    return tuning or self.plan.budget

  @functools.cached_property
  def config(self) -> schema.Config:
    """The plan's config with the budget, the seed and the values of this run.

    Warmup takes at most a tenth of the steps, unless a value sets
    `optimizer.warmup_steps`.
    """
    values = assignments(self.plan.vary.field, self.choice)
    if self.plan.tune and self.candidate:
      values[self.plan.tune.field] = self.candidate
    config = config_lib.with_texts(self.plan.config, values)

    # If a clock ends the run, the number of steps must only be out
    # of its reach.
    kind, amount = self.budget
    steps = int(amount) if kind == "steps" else stopwatch.MOST - 1

    # Warmup of the whole budget would compare runs that never reach their
    # peak learning rate.
    warmup = config.optimizer.warmup_steps
    if "optimizer.warmup_steps" not in values:
      warmup = min(warmup, steps // 10)
    fields = {
      "train.steps": steps,
      "train.seed": self.plan.seeds.stop if self.seed is None else self.seed,
      "optimizer.warmup_steps": warmup,
    }
    return config.replace(**fields)


def parse_budget(text: str, flag: str) -> Budget:
  """Parses "KIND:N", for example "steps:500".

  Args:
    text: what is limited, and to how much.
    flag: the name of the flag that has this value, for errors.

  Raises:
    ValueError: the kind is unknown, or the number is unsuitable.
  """
  kind, amount = stopwatch.parse_limit(text, flag, ("steps", *stopwatch.TIMES))
  if kind == "steps" and amount % 1:
    raise ValueError(f"--{flag}={text}: steps must be an integer")
  return Budget(kind, amount)


def parse_axis(text: str, flag: str) -> Axis:
  """Parses "group.field=value,value", the value of a flag.

  Values are separated by commas outside brackets; if there is a semicolon, by
  semicolons only.

  Args:
    text: a field and its values.
    flag: the name of the flag, for errors.

  Raises:
    ValueError: values are empty, equal or too many, or a field is unknown.
  """
  field, _, values = text.partition("=")
  separator = ";" if ";" in values else OUTSIDE
  choices = [value.strip() for value in re.split(separator, values)]

  # Equal values would share a folder, and empty ones are mostly slips.
  are_different = all(choices) and len(set(choices)) == len(choices)
  if not are_different or len(choices) > MAX_VALUES:
    raise ValueError(
      f"--{flag}={text[:MAX_NAME]} must give different values after {field}=,"
      f" at most {MAX_VALUES}"
    )

  for choice in choices:
    for name in assignments(field, choice):
      schema.check_name(name)
  return Axis(field, choices)


def assignments(field: str, choice: str) -> dict[str, str]:
  """The fields that a choice sets, and their values.

  >>> assignments("attention.pattern", "dense with data.length=512")
  {'attention.pattern': 'dense', 'data.length': '512'}

  Raises:
    ValueError: a field is set twice.
  """
  value, _, rest = choice.partition(" with ")
  values = {field: value}
  for word in rest.split():
    name, _, value = word.partition("=")
    if name in values:
      raise ValueError(f"{field}={choice} sets a field twice; leave one out")
    values[name] = value
  return values


def folder_name(choice: str) -> str:
  """The name of a folder, a different one for each choice.

  >>> folder_name("local"), folder_name("Local(4) | Strided(4)")
  ('local', 'Local_4_Strided_4-14ae6e10')
  """
  # Spaces and brackets would have to be quoted in a shell.
  name = re.sub(r"[^\w.=+-]+", "_", choice).strip("_")
  if name == choice and name.strip(".") and len(name.encode()) <= MAX_NAME:
    return name

  # Different choices may become the same name, so a checksum distinguishes
  # them. Cutting may split a character of several bytes, whose rest is dropped.
  name = name.encode()[:MAX_NAME].decode(errors="ignore")
  return f"{name}-{zlib.crc32(choice.encode()):08x}"
