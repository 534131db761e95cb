"""The fields of a config: defaults, meaning, values allowed.

Each group of fields is a dataclass, and each field has its rule. Checks,
`--help` and docs/config.md come from these. What depends on several fields, on
the data or on the devices is checked where it is used. So are the names of data
sources, patterns, modes and backends, because other code can register more.
"""

import dataclasses
import difflib
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

# What the backward pass recomputes, from the least to the most. A step that
# recomputes less does less work and needs more memory: "auto" takes the first
# that fits.
REMATS = ("none", "block_but_attention", "block")


class Rule(NamedTuple):
  """The values that a field may have.

  Attributes:
    text: describes them, for the error "NAME=VALUE must be TEXT".
    accepts: returns whether a value is among them.
  """

  text: str
  accepts: Callable[[Any], bool]


def integer(at_least: int, below: int = 2**31) -> Rule:
  """The rule of an integer; by default it fits the 32 bits of devices."""
  return Rule(
    f"an integer at least {at_least} and below {below:,}",
    lambda x: type(x) is int and at_least <= x < below,
  )


def number(bounds: str, is_within: Callable[[float], bool]) -> Rule:
  """The rule of a number within bounds, which float32 can hold."""
  return Rule(
    f"a finite number {bounds}",
    lambda x: type(x) in (int, float) and abs(x) < 1e38 and is_within(x),
  )


def one_of(*known: str) -> Rule:
  """The rule of a name that is one of those that are known."""
  text = f"one of {', '.join(known)}"
  return Rule(text, lambda x: type(x) is str and x in known)


def items(text: str, rule: Rule, are: Callable = lambda x: True) -> Rule:
  """The rule of a tuple.

  Args:
    text: describes its values.
    rule: that of each item.
    are: whether all items together are allowed.
  """
  # A list, as JSON has it, is made a tuple by `Config.replace`.
  each = lambda x: type(x) is tuple and all(map(rule.accepts, x))
  return Rule(text, lambda x: each(x) and are(x))


SIZE, COUNT = integer(1), integer(0)
# The number of layers or heads: a network has a Python object for each.
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
# The rules of fields that give none, by the type of the default.
RULES = {
  bool: Rule("True or False", lambda x: type(x) is bool),
  str: Rule("a string", lambda x: type(x) is str),
  int: COUNT,
  float: number("at least 0", lambda x: x >= 0),
}
NAMES = items(
  "a tuple of different names", RULES[str], lambda x: len({*x}) == len(x)
)


# What changes with the value of a field, and so who may change it: `config` has
# the same as sets, for a run that resumes and for commands that read a run.
Affects = Literal[
  # How a run logs and keeps what it computes: any resumed run may change it.
  "nothing",
  # Paths and devices, which differ between machines: likewise.
  "machine",
  # How weights come about at first: no resumed run may; commands may.
  "start",
  # How weights come about from any step on: with --allow_changes.
  "updates",
  # Updates, and what given weights score: with --allow_changes.
  "scores",
  # Results only in their last digits: where a run is read.
  "rounding",
  # Which data, if their symbols mean the same: where a run is read, and given
  # other data.
  "data",
  # What the network is, and what it is trained on: never.
  "all",
]


def field(
  default: Any, help: str, rule: Rule | None = None, *, affects: Affects
) -> Any:
  """A field of a config.

  Args:
    default: its value where nobody sets it.
    help: its meaning with unit, for `--help` and docs/config.md.
    rule: the values allowed; by default those of the default's type.
    affects: what another value changes.
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
  """Fields that belong together; may also be read as a mapping."""

  def keys(self) -> Iterable[str]:
    """The names of the fields."""
    return (x.name for x in dataclasses.fields(self))  # type: ignore[arg-type]

  def __getitem__(self, name: str) -> Any:
    return getattr(self, name)


@dataclass(frozen=True, kw_only=True)
class Data(Group):
  """What is modelled, and where it is read."""

  name: str = field(
    "digits",
    "data set: digits, cifar10, bytes, ...: docs/data.md",
    affects="data",
  )
  path: str = field(
    "", "file or folder; empty: the data set's default place", affects="machine"
  )
  length: int = field(
    1024, "tokens of a sequence, unless images", SIZE, affects="all"
  )
  documents: bool = field(
    False, "no attention between files or records of text", affects="all"
  )
  columns: int = field(
    128,
    "width of the grid in which positions of text are embedded",
    SIZE,
    affects="all",
  )
  orders: tuple[str, ...] = field(
    (),
    "permutations of images: rotation, ...: docs/data.md",
    NAMES,
    affects="all",
  )
  fractions: tuple[float, ...] = field(
    (0.9, 0.05, 0.05),
    "sizes of train, validation, test, unless names tell them",
    SHARES,
    affects="data",
  )
  splits: str = field(
    "auto",
    "how splits are found; auto: by names, if they are clear",
    one_of("auto", "names", "fractions"),
    affects="data",
  )
  vocab_size: int = field(
    256, "number of different tokens", integer(2), affects="all"
  )
  rate: int = field(
    12_000, "samples per second of audio", integer(1, 1_000_001), affects="all"
  )
  symbols: int = field(
    16, "size of the alphabet of repeat", integer(2, 257), affects="all"
  )
  period: int = field(
    256, "positions from a symbol of repeat to its copy", SIZE, affects="all"
  )
  noise: float = field(
    0.0, "probability that repeat draws a copy anew", SHARE, affects="all"
  )
  pairs: int = field(
    16, "pairs of key and value, in recall", integer(1, 128), affects="all"
  )
  sizes: tuple[int, ...] = field(
    (96_000, 2_000, 2_000),
    "sizes of train, validation, test of listops",
    SIZES,
    affects="all",
  )


@dataclass(frozen=True, kw_only=True)
class Model(Group):
  """The network."""

  task: str = field(
    "generate",
    "predicts tokens, or a label",
    one_of("generate", "classify"),
    affects="all",
  )
  num_layers: int = field(8, "residual blocks", AMOUNT, affects="all")
  num_heads: int = field(
    4, "heads of a block; they share the width", AMOUNT, affects="all"
  )
  key_heads: int = field(
    0,
    "heads of keys and values; 0: num_heads",
    integer(0, 10_001),
    affects="all",
  )
  max_span: int = field(
    0, "longest learned span of a head; 0: none", affects="all"
  )
  sinks: bool = field(
    False, "a learned logit per head, in each softmax", affects="all"
  )
  positions: str = field(
    "learned",
    "learned embeddings, or rotated queries and keys",
    one_of("learned", "rotary"),
    affects="all",
  )
  rotary_base: float = field(
    10_000.0, "base of rotary positions", POSITIVE, affects="all"
  )
  width: int = field(256, "width of the residual stream", SIZE, affects="all")
  half_size: bool = field(
    False, "halves MLPs, and widths of queries and keys", affects="all"
  )
  dropout: float = field(
    0.0,
    "rate, where residual branches end; within 0.5 % of it",
    FRACTION,
    affects="start",
  )
  token_std: float = field(
    0.013,
    "initial deviation of token embeddings; images: 0.01",
    affects="start",
  )
  position_std: float = field(
    0.007, "initial deviation of position embeddings", affects="start"
  )
  dtype: str = field(
    "float32",
    "dtype of activations; weights, norms and the loss: float32",
    one_of("float32", "bfloat16", "float16"),
    affects="rounding",
  )
  remat: str = field(
    "auto",
    "what the backward pass recomputes; auto: the least that fits",
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
  """What attends to what: Child et al. 2019, sections 4.2 and 4.3."""

  pattern: str = field(
    "strided",
    "dense, local, strided, fixed, strided_target, a layout such as gemma3, or"
    " an expression over docs/patterns.md: Local(96) | Global(8)",
    affects="scores",
  )
  mode: str = field(
    "interleaved",
    "how layers and heads get the factors of a pattern",
    affects="scores",
  )
  cycle: tuple[int, ...] = field(
    (), "order of factors; (): 0, 1, ...", CYCLE, affects="scores"
  )
  stride: int = field(
    128,
    "l, for strided; block size, for fixed",
    SIZE,
    affects="scores",
  )
  window: int = field(
    128,
    "keys of local and gpt3, the query included",
    SIZE,
    affects="scores",
  )
  width: int = field(
    32,
    "c, for fixed: summary columns of a block",
    SIZE,
    affects="scores",
  )
  num_summaries: int = field(
    1,
    "distinct summary columns across heads",
    SIZE,
    affects="scores",
  )
  backend: str = field(
    "auto", "auto, dense, or the name of another backend", affects="machine"
  )
  check: bool = field(
    True, "with auto, first compares kernels with XLA", affects="nothing"
  )


@dataclass(frozen=True, kw_only=True)
class Optimizer(Group):
  """Updates: Child et al. 2019, section 6; betas as released."""

  name: str = field(
    "adamw",
    "muon: for the matrices of blocks; adamw for the rest",
    one_of("adamw", "muon"),
    affects="start",
  )
  learning_rate: float = field(0.00035, "peak learning rate", affects="updates")
  warmup_steps: int = field(
    5000, "linear warm-up, before the schedule", affects="updates"
  )
  schedule: str = field(
    "cosine",
    "decay over all steps; wsd: linear, over the last fifth",
    one_of("constant", "linear", "cosine", "wsd"),
    affects="updates",
  )
  minimum: float = field(
    0.0, "end of the decay, as a share of the peak", SHARE, affects="updates"
  )
  beta1: float = field(
    0.9, "decay of the mean gradient", FRACTION, affects="updates"
  )
  beta2: float = field(
    0.999, "decay of the mean squared gradient", FRACTION, affects="updates"
  )
  weight_decay: float = field(
    0.01, "times the learning rate; of matrices only", affects="updates"
  )
  ema_decay: float = field(
    0.999,
    "decay of the averaged weights, which are evaluated",
    SHARE,
    affects="updates",
  )


@dataclass(frozen=True, kw_only=True)
class Train(Group):
  """Steps and batches."""

  # JAX ignores the upper bits of larger seeds.
  seed: int = field(
    0,
    "seed of weights, data order, dropout",
    integer(0, 2**32),
    affects="start",
  )
  steps: int = field(
    100_000,
    "number of updates; 0: saves the initial weights",
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
    False, "random weights where those of init_from do not fit", affects="start"
  )
  accumulation: int = field(
    1, "micro-batches per update", SIZE, affects="updates"
  )
  log_every: int = field(
    50, "steps between lines of metrics", affects="nothing"
  )


@dataclass(frozen=True, kw_only=True)
class Eval(Group):
  """Scores in training, and the batches of `eval.py`."""

  every: int = field(
    2000, "steps between validations; 0: after the last", affects="nothing"
  )
  batch_size: int = field(16, "sequences of a batch", SIZE, affects="nothing")
  # Weights do not depend on it, but validations before and after a change could
  # not be compared, nor the best step chosen.
  sequences: int = field(
    256, "validation sequences during training; 0: all", affects="updates"
  )


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Group):
  """What is saved."""

  every: int = field(
    2000, "steps between checkpoints; 0: after the last", affects="nothing"
  )
  keep: int = field(
    2, "latest checkpoints to keep, besides the best", SIZE, affects="nothing"
  )


@dataclass(frozen=True, kw_only=True)
class Mesh(Group):
  """The devices along each axis."""

  data: int = field(
    -1, "devices that split the batch", DEVICES, affects="machine"
  )
  fsdp: int = field(
    1,
    "devices that split batch, weights, optimizer",
    DEVICES,
    affects="machine",
  )
  sequence: int = field(
    1, "devices that split positions", DEVICES, affects="machine"
  )
  tensor: int = field(
    1, "devices that split heads and MLPs", DEVICES, affects="machine"
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
    """{group: {field: value}}."""
    return dataclasses.asdict(self)

  def replace(self, **values: Any) -> Self:
    """A copy in which some fields, "group.name", have other values.

    Raises ValueError if a field is unknown, or cannot have its value.
    """
    groups = self.to_dict()
    for name, value in values.items():
      check_name(name)
      if isinstance(value, list):  # as in JSON
        value = tuple(value)
      # Such as 1e3, which is a float.
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
  """The `Config` that a ConfigDict stands for; defaults of what it lacks.

  Raises ValueError, with its rule, if a field is unknown or invalid.
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
  """Raises ValueError unless a field exists; the error names similar ones."""
  if name in FIELDS:
    return

  # The same field of another group, or a name spelled like it.
  _, dot, last = f".{name}".rpartition(".")
  similar = [x for x in FIELDS if x.endswith(dot + last)]
  similar = similar or difflib.get_close_matches(name, FIELDS)
  close = f"; did you mean {', '.join(similar)}?" if similar else ""
  raise ValueError(
    f"the config has no field {name!r}; docs/config.md lists all{close}"
  )


def check_value(name: str, value: object) -> None:
  """Raises ValueError unless a field, "group.name", may have this value."""
  rule = FIELDS[name].metadata["rule"]
  if not rule.accepts(value):
    raise ValueError(f"{name}={reprlib.repr(value)} must be {rule.text}")


def flatten(config: Any) -> dict[str, Any]:
  """{"group.name": value} of a `Config` or a ConfigDict."""
  return {
    f"{group}.{name}": value
    for group, fields in config.to_dict().items()
    for name, value in fields.items()
  }


def affects(name: str) -> Affects:
  """What a field, "group.name", affects."""
  return FIELDS[name].metadata["affects"]


def table() -> list[tuple[str, str, str, str]]:
  """(name, default, meaning, values allowed) of all fields, as text."""
  return [
    (name, repr(x.default), x.metadata["help"], x.metadata["rule"].text)
    for name, x in FIELDS.items()
  ]
