"""The fields of a config: defaults, meanings, allowed values.

Each group of fields is a dataclass, and each field has a rule for its values.
Checks, `--help` and docs/config.md are derived from these dataclasses.
Conditions that depend on several fields, on the data or on the devices are
checked where the values are used. The names of data sources, patterns, modes
and backends are checked there too, because other code can register more names.
"""

import dataclasses
import difflib
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

# What the backward pass recomputes, from the least to the most. Recomputing
# less saves work but needs more memory, so "auto" chooses the first that fits.
REMATS = ("none", "block_but_attention", "block")


class Rule(NamedTuple):
  """The allowed values of a field.

  Attributes:
    text: describes the values, for the error "NAME=VALUE must be TEXT".
    accepts: returns whether a value is allowed.
  """

  text: str
  accepts: Callable[[Any], bool]


def integer(at_least: int, below: int = 2**31) -> Rule:
  """Returns the rule for an integer; by default, it must fit in 32 bits."""
  return Rule(
    f"an integer at least {at_least} and below {below:,}",
    lambda x: type(x) is int and at_least <= x < below,
  )


def number(bounds: str, is_within: Callable[[float], bool]) -> Rule:
  """Returns the rule for a number in the range of float32 and within bounds.

  Args:
    bounds: describes the bounds, for the error.
    is_within: returns whether a number is within the bounds.
  """
  return Rule(
    f"a finite number {bounds}",
    lambda x: type(x) in (int, float) and abs(x) < 1e38 and is_within(x),
  )


def one_of(*known: str) -> Rule:
  """Returns the rule for a string that must be one of the known names."""
  text = f"one of {', '.join(known)}"
  return Rule(text, lambda x: type(x) is str and x in known)


def items(text: str, rule: Rule, are: Callable = lambda x: True) -> Rule:
  """Returns the rule for a tuple.

  Args:
    text: describes the allowed tuples.
    rule: the rule for each item.
    are: returns whether all items together are allowed.
  """
  # `Config.replace` has already converted lists, as in JSON, to tuples.
  each = lambda x: type(x) is tuple and all(map(rule.accepts, x))
  return Rule(text, lambda x: each(x) and are(x))


SIZE, COUNT = integer(1), integer(0)
# Numbers of layers and heads are limited, because a network creates a Python
# object for each.
AMOUNT = integer(1, below=10_001)
POSITIVE = number("above 0", lambda x: x > 0)
FRACTION = number("at least 0 and below 1", lambda x: 0 <= x < 1)
SHARE = number("at least 0 and at most 1", lambda x: 0 <= x <= 1)
SHARES = items(
  "three numbers above 0 that sum to 1",
  POSITIVE,
  lambda x: len(x) == 3 and abs(sum(x) - 1) < 1e-6,
)
SIZES = items("three integers at least 1", SIZE, lambda x: len(x) == 3)
CYCLE = items(f"a tuple, each item {COUNT.text}", COUNT)
DEVICES = Rule(
  "an integer at least 1, or -1 for all remaining devices",
  lambda x: SIZE.accepts(x) or (type(x) is int and x == -1),
)
# The rule of a field that does not specify one, by the type of its default.
RULES = {
  bool: Rule("True or False", lambda x: type(x) is bool),
  str: Rule("a string", lambda x: type(x) is str),
  int: COUNT,
  float: number("at least 0", lambda x: x >= 0),
}
NAMES = items(
  "a tuple of different names", RULES[str], lambda x: len({*x}) == len(x)
)


# What a change of a field affects, which decides when it may change. The
# policies in `config` list the allowed values for runs that resume and for
# commands that read a run.
Affects = Literal[
  # Only what a run logs and saves. Any resumed run may change it.
  "nothing",
  # Paths and devices, which differ between machines. Any resumed run may change
  # them.
  "machine",
  # How the run begins. A resumed run may not change it, but commands that read
  # the run may.
  "start",
  # The updates of weights from any step on. A run that resumes with
  # --allow_changes may change it.
  "updates",
  # The updates, and the scores of given weights. A run that resumes with
  # --allow_changes may change it.
  "scores",
  # Only the last digits of results. Only commands that read a run may change
  # it.
  "rounding",
  # The data, though not the meaning of their symbols. Only commands that are
  # given other data may change it.
  "data",
  # The network, or what it is trained on. Nothing may change it.
  "all",
]


def field(
  default: Any, help: str, rule: Rule | None = None, *, affects: Affects
) -> Any:
  """Defines a config field.

  Args:
    default: the value if the config does not set the field.
    help: the meaning of the field, with its unit, for `--help` and
      docs/config.md.
    rule: the rule for allowed values; by default, the rule for the type of
      `default`.
    affects: what a change of the value affects.
  """
  return dataclasses.field(
    default=default,
    metadata=dict(
      help=help,
      rule=rule or RULES[type(default)],
      affects=affects,
    ),
  )


class Group:
  """A group of related fields, which can also be read as a mapping."""

  def keys(self) -> Iterable[str]:
    """The names of the fields."""
    return (x.name for x in dataclasses.fields(self))  # type: ignore[arg-type]

  def __getitem__(self, name: str) -> Any:
    return getattr(self, name)


@dataclass(frozen=True, kw_only=True)
class Data(Group):
  """The data to model, and where to read them."""

  name: str = field(
    "digits",
    "data set, such as digits, cifar10 or bytes; see docs/data.md",
    affects="data",
  )
  path: str = field(
    "",
    "file or folder; empty: the default location of the data set",
    affects="machine",
  )
  length: int = field(
    1024,
    "tokens per sequence; images set their own length",
    SIZE,
    affects="all",
  )
  documents: bool = field(
    False,
    "whether attention stays within a document (a file or record of text)",
    affects="all",
  )
  columns: int = field(
    128,
    "width of the grid used to embed positions of text",
    SIZE,
    affects="all",
  )
  orders: tuple[str, ...] = field(
    (),
    "permutations of images, such as rotation; see docs/data.md",
    NAMES,
    affects="all",
  )
  fractions: tuple[float, ...] = field(
    (0.9, 0.05, 0.05),
    "shares of train, validation and test if file names do not define splits",
    SHARES,
    affects="data",
  )
  splits: str = field(
    "auto",
    "how splits are found; auto: by file names if they are unambiguous",
    one_of("auto", "names", "fractions"),
    affects="data",
  )
  vocab_size: int = field(
    256, "number of distinct tokens", integer(2), affects="all"
  )
  rate: int = field(
    12_000, "samples per second of audio", integer(1, 1_000_001), affects="all"
  )
  symbols: int = field(
    16, "size of the alphabet of repeat", integer(2, 257), affects="all"
  )
  period: int = field(
    256,
    "distance in positions from a symbol of repeat to its copy",
    SIZE,
    affects="all",
  )
  noise: float = field(
    0.0,
    "probability that repeat replaces a copy with a random symbol",
    SHARE,
    affects="all",
  )
  pairs: int = field(
    16,
    "number of key-value pairs in a sequence of recall",
    integer(1, 128),
    affects="all",
  )
  sizes: tuple[int, ...] = field(
    (96_000, 2_000, 2_000),
    "numbers of examples in train, validation and test of listops",
    SIZES,
    affects="all",
  )


@dataclass(frozen=True, kw_only=True)
class Model(Group):
  """The network."""

  task: str = field(
    "generate",
    "whether the network generates tokens or classifies sequences",
    one_of("generate", "classify"),
    affects="all",
  )
  num_layers: int = field(8, "residual blocks", AMOUNT, affects="all")
  num_heads: int = field(
    4,
    "heads per block, among which the width is divided",
    AMOUNT,
    affects="all",
  )
  key_heads: int = field(
    0,
    "number of KV heads; 0: as many as query heads (num_heads)",
    integer(0, 10_001),
    affects="all",
  )
  max_span: int = field(
    0,
    "maximum attention span that a head can learn; 0: no learned spans",
    affects="all",
  )
  sinks: bool = field(
    False, "adds a learned logit per head to each softmax", affects="all"
  )
  positions: str = field(
    "learned",
    "learned position embeddings, or rotary queries and keys",
    one_of("learned", "rotary"),
    affects="all",
  )
  rotary_base: float = field(
    10_000.0, "base of rotary positions", POSITIVE, affects="all"
  )
  width: int = field(256, "width of the residual stream", SIZE, affects="all")
  half_size: bool = field(
    False,
    "halves the MLP width and the width of queries and keys",
    affects="all",
  )
  dropout: float = field(
    0.0,
    "dropout rate at the end of residual branches, accurate to 0.5 %",
    FRACTION,
    affects="start",
  )
  token_std: float = field(
    0.013,
    "initial standard deviation of token embeddings; for images, use 0.01",
    affects="start",
  )
  position_std: float = field(
    0.007,
    "initial standard deviation of position embeddings",
    affects="start",
  )
  dtype: str = field(
    "float32",
    "dtype of activations; weights, norms and the loss are always float32",
    one_of("float32", "bfloat16", "float16"),
    affects="rounding",
  )
  remat: str = field(
    "auto",
    "what the backward pass recomputes; auto: as little as fits in memory",
    one_of("auto", *REMATS),
    affects="nothing",
  )
  experts: int = field(
    0,
    "experts in the MLP of every second block; 0: none",
    Rule("0, or at least 2", lambda x: COUNT.accepts(x) and x != 1),
    affects="all",
  )


@dataclass(frozen=True, kw_only=True)
class Attention(Group):
  """Which positions attend to which (Child et al. 2019, sections 4.2, 4.3)."""

  pattern: str = field(
    "strided",
    "dense, local, strided, fixed, strided_target, a layout such as gemma3, or"
    " an expression of patterns such as Local(96) | Global(8); see"
    " docs/patterns.md",
    affects="scores",
  )
  mode: str = field(
    "interleaved",
    "how the factors of a pattern are assigned to layers and heads",
    affects="scores",
  )
  cycle: tuple[int, ...] = field(
    (),
    "indices of the factors in the order of use; (): 0, 1, ...",
    CYCLE,
    affects="scores",
  )
  stride: int = field(
    128,
    "stride l of strided; block size of fixed",
    SIZE,
    affects="scores",
  )
  window: int = field(
    128,
    "window of local and gpt3 in keys, including the query's own",
    SIZE,
    affects="scores",
  )
  width: int = field(
    32,
    "number c of summary columns per block of fixed",
    SIZE,
    affects="scores",
  )
  num_summaries: int = field(
    1,
    "number of different choices of summary columns across heads",
    SIZE,
    affects="scores",
  )
  backend: str = field(
    "auto", "auto, dense, or the name of another backend", affects="machine"
  )
  check: bool = field(
    True,
    "with backend=auto, compares kernels with XLA before they are used",
    affects="nothing",
  )


@dataclass(frozen=True, kw_only=True)
class Optimizer(Group):
  """Updates (Child et al. 2019, section 6); betas of the released code."""

  name: str = field(
    "adamw",
    "adamw; or muon for the matrices of blocks and adamw for the rest",
    one_of("adamw", "muon"),
    affects="start",
  )
  learning_rate: float = field(0.00035, "peak learning rate", affects="updates")
  warmup_steps: int = field(
    5000, "steps of linear warm-up before the schedule", affects="updates"
  )
  schedule: str = field(
    "cosine",
    "decay of the learning rate over all steps; wsd: linear decay over the last"
    " fifth of the steps",
    one_of("constant", "linear", "cosine", "wsd"),
    affects="updates",
  )
  minimum: float = field(
    0.0,
    "final learning rate, as a fraction of the peak",
    SHARE,
    affects="updates",
  )
  beta1: float = field(
    0.9, "decay of the mean gradient", FRACTION, affects="updates"
  )
  beta2: float = field(
    0.999, "decay of the mean squared gradient", FRACTION, affects="updates"
  )
  weight_decay: float = field(
    0.01,
    "weight decay of matrices, multiplied by the learning rate",
    affects="updates",
  )
  ema_decay: float = field(
    0.999,
    "decay rate of the averaged weights, which are used in evaluation",
    SHARE,
    affects="updates",
  )


@dataclass(frozen=True, kw_only=True)
class Train(Group):
  """Steps and batches."""

  # JAX ignores the upper bits of larger seeds.
  seed: int = field(
    0,
    "seed of initial weights, data order and dropout",
    integer(0, 2**32),
    affects="start",
  )
  steps: int = field(
    100_000,
    "number of updates; 0: only saves the initial weights",
    affects="updates",
  )
  batch_size: int = field(
    16, "sequences per update, over all devices", SIZE, affects="updates"
  )
  init_from: str = field(
    "",
    "averaged weights to start from: WORKDIR, WORKDIR:STEP, WORKDIR:best, an"
    " exported file or a released .npz; empty: random weights",
    affects="start",
  )
  init_partial: bool = field(
    False,
    "uses random weights where those of init_from do not fit",
    affects="start",
  )
  accumulation: int = field(
    1, "micro-batches per update", SIZE, affects="updates"
  )
  log_every: int = field(
    50, "steps between lines of metrics", affects="nothing"
  )


@dataclass(frozen=True, kw_only=True)
class Eval(Group):
  """Validation during training, and the batches of `eval.py`."""

  every: int = field(
    2000,
    "steps between validations; 0: only after the last step",
    affects="nothing",
  )
  batch_size: int = field(
    16, "sequences per batch of an evaluation", SIZE, affects="nothing"
  )
  # This does not affect weights. But after a change, validations could not be
  # compared with earlier ones, so the best step would be meaningless.
  sequences: int = field(
    256, "validation sequences during training; 0: all", affects="updates"
  )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Group):
  """What is saved."""

  every: int = field(
    2000,
    "steps between checkpoints; 0: only after the last step",
    affects="nothing",
  )
  keep: int = field(
    2,
    "number of latest checkpoints to keep in addition to the best",
    SIZE,
    affects="nothing",
  )


@dataclass(frozen=True, kw_only=True)
class Mesh(Group):
  """The number of devices along each axis of the mesh."""

  data: int = field(
    -1,
    "number of devices over which the batch is split",
    DEVICES,
    affects="machine",
  )
  fsdp: int = field(
    1,
    "number of devices over which batch, weights and optimizer state are split",
    DEVICES,
    affects="machine",
  )
  sequence: int = field(
    1,
    "number of devices over which positions are split",
    DEVICES,
    affects="machine",
  )
  tensor: int = field(
    1,
    "number of devices over which heads and MLPs are split",
    DEVICES,
    affects="machine",
  )


@dataclass(frozen=True, kw_only=True)
class Config(Group):
  """The config of an experiment."""

  data: Data = Data()
  model: Model = Model()
  attention: Attention = Attention()
  optimizer: Optimizer = Optimizer()
  train: Train = Train()
  eval: Eval = Eval()
  checkpoint: Checkpoint = Checkpoint()
  mesh: Mesh = Mesh()

  def to_dict(self) -> dict[str, dict[str, Any]]:
    """Returns {group: {field: value}}."""
    return dataclasses.asdict(self)

  def replace(self, **values: Any) -> Self:
    """Returns a copy in which some fields have other values.

    Args:
      **values: the new values by "group.name".

    Raises ValueError if a field is unknown or its value is not allowed.
    """
    groups = self.to_dict()
    for name, value in values.items():
      check_name(name)
      if isinstance(value, list):  # JSON has no tuples
        value = tuple(value)
      # Accept 1e3 for an integer, though it is a float in Python.
      is_of_integer = FIELDS[name].type is int
      if is_of_integer and isinstance(value, float) and value.is_integer():
        value = int(value)
      check_value(name, value)
      group, _, field = name.partition(".")
      groups[group][field] = value

    return type(self)(
      **{name: GROUPS[name](**fields) for name, fields in groups.items()}
    )


GROUPS: dict[str, Any] = {x.name: x.type for x in dataclasses.fields(Config)}
FIELDS = {
  f"{group}.{x.name}": x
  for group, kind in GROUPS.items()
  for x in dataclasses.fields(kind)
}


def typed(config: Any) -> Config:
  """Converts a ConfigDict to a `Config`; omitted fields get their defaults.

  Raises ValueError if a field is unknown or its value is not allowed. The error
  contains the rule of the field.
  """
  if isinstance(config, Config):
    return config
  try:
    values = flatten(config)
  except AttributeError as error:
    raise ValueError(
      "the config must be a ConfigDict with the groups and fields of"
      f" docs/config.md: {error}"
    ) from None

  return Config().replace(**values)


def check_name(name: str) -> None:
  """Raises ValueError if a field does not exist, and suggests similar names."""
  if name in FIELDS:
    return

  # Suggest the same field in another group, or else a similar spelling.
  _, dot, last = f".{name}".rpartition(".")
  similar = [x for x in FIELDS if x.endswith(dot + last)]
  similar = similar or difflib.get_close_matches(name, FIELDS)
  close = f"; did you mean {', '.join(similar)}?" if similar else ""
  raise ValueError(
    f"the config has no field {name!r}; docs/config.md lists all{close}"
  )


def check_value(name: str, value: object) -> None:
  """Raises ValueError if a field, "group.name", does not allow a value."""
  rule = FIELDS[name].metadata["rule"]
  if not rule.accepts(value):
    raise ValueError(f"{name}={reprlib.repr(value)} must be {rule.text}")


def flatten(config: Any) -> dict[str, Any]:
  """Returns {"group.name": value} for a `Config` or a ConfigDict."""
  return {
    f"{group}.{name}": value
    for group, fields in config.to_dict().items()
    for name, value in fields.items()
  }


def affects(name: str) -> Affects:
  """Returns what a change of a field, "group.name", affects."""
  return FIELDS[name].metadata["affects"]


def table() -> list[tuple[str, str, str, str]]:
  """Returns (name, default, meaning, allowed values) of each field, as text."""
  return [
    (name, repr(x.default), x.metadata["help"], x.metadata["rule"].text)
    for name, x in FIELDS.items()
  ]
