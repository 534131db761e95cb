"""The fields of a config: defaults, meaning, values allowed.

Each group of fields is a dataclass, and each field has its rule. Checks,
`--help` and docs/config.md come from these. What depends on several fields, on
the data or on the devices is checked where it is used, and so are the names of
data sources, patterns, modes and backends, to which other code can add.
"""

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

# What the backward pass recomputes, from the least to the most.
REMATS = ("none", "attention", "block_but_attention", "block")


@dataclass(frozen=True)
class Rule:
  """The values that a field may have."""

  text: str  # the end of the error message "... must be ..."
  accepts: Callable[[Any], bool]  # whether a value is allowed


def integer(at_least: int, below: int = 2**31) -> Rule:
  """An integer within bounds; devices count in 32 bits."""
  return Rule(
    f"an integer at least {at_least} and below {below:,}",
    lambda x: type(x) is int and at_least <= x < below,
  )


def number(bounds: str, is_within: Callable[[float], bool]) -> Rule:
  """A number within bounds that float32 can hold."""
  return Rule(
    f"a finite number {bounds}",
    lambda x: type(x) in (int, float) and abs(x) < 1e38 and is_within(x),
  )


def one_of(*known: str) -> Rule:
  """One of the known names."""
  text = f"one of {', '.join(known)}"
  return Rule(text, lambda x: type(x) is str and x in known)


def items(rule: Rule) -> Rule:
  """A tuple whose items follow a rule."""
  return Rule(
    f"a tuple, each item {rule.text}",
    lambda x: type(x) is tuple and all(map(rule.accepts, x)),
  )


SIZE, COUNT = integer(1), integer(0)
AMOUNT = integer(1, below=10_001)  # a network has an object for each of them
NOT_NEGATIVE = number("at least 0", lambda x: x >= 0)
POSITIVE = number("above 0", lambda x: x > 0)
FRACTION = number("at least 0 and below 1", lambda x: 0 <= x < 1)
SHARE = number("at least 0 and at most 1", lambda x: 0 <= x <= 1)
SHARES = Rule(
  "three numbers above 0 that sum to 1",
  lambda x: (
    items(POSITIVE).accepts(x) and len(x) == 3 and abs(sum(x) - 1) < 1e-6
  ),
)
SIZES = Rule(
  "three integers at least 1", lambda x: items(SIZE).accepts(x) and len(x) == 3
)
LIMIT = Rule(
  "a finite number above 0, or infinite",
  lambda x: x == math.inf or POSITIVE.accepts(x),
)
DEVICES = Rule(
  "an integer at least 1, or -1 for all remaining devices",
  lambda x: SIZE.accepts(x) or (type(x) is int and x == -1),
)
# Of fields for which nothing else is said.
RULES = {
  bool: Rule("True or False", lambda x: type(x) is bool),
  str: Rule("a string", lambda x: type(x) is str),
  int: COUNT,
  float: NOT_NEGATIVE,
}


def field(default: Any, about: str, rule: Rule | None = None) -> Any:
  """A field: its default, its meaning with unit, and the values allowed."""
  rule = rule or RULES[type(default)]
  return dataclasses.field(
    default=default, metadata=dict(about=about, rule=rule)
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
    "digits, cifar10, imagenet64, images, stdlib, bytes, jsonl, tokens,"
    " enwik8, text8, fasta, audio, repeat, recall; with labels: cifar10_gray,"
    " labelled, listops",
  )
  path: str = field("", "file or folder; empty: the data set's default place")
  length: int = field(
    1024, "symbols of a sequence; images have their own", SIZE
  )
  documents: bool = field(
    False,
    "of bytes, jsonl and fasta: a separator ends each file or record, and"
    " nothing attends across",
  )
  columns: int = field(
    128, "of text, whose positions are embedded as (row, column)", SIZE
  )
  fractions: tuple[float, ...] = field(
    (0.9, 0.05, 0.05),
    "train, validation, test of stdlib, bytes, jsonl, tokens, fasta, audio,"
    " images and labelled, unless files or folders are named train, val and"
    " test",
    SHARES,
  )
  vocab_size: int = field(256, "number of different tokens", integer(2))
  rate: int = field(
    12_000, "samples per second of audio", integer(1, below=1_000_001)
  )
  symbols: int = field(
    16, "number of different symbols of repeat", integer(2, below=257)
  )
  period: int = field(
    256, "positions from a symbol to its copy, of repeat", SIZE
  )
  noise: float = field(0.0, "probability that repeat draws a copy anew", SHARE)
  pairs: int = field(16, "keys with a value, of recall", integer(1, below=128))
  sizes: tuple[int, ...] = field(
    (96_000, 2_000, 2_000),
    "train, validation, test of listops, in examples",
    SIZES,
  )


@dataclass(frozen=True, kw_only=True)
class Model(Group):
  """The network."""

  task: str = field(
    "generate",
    "predicts each symbol from those before it, or the label of a sequence,"
    " whose positions may all see each other",
    one_of("generate", "classify"),
  )
  num_layers: int = field(8, "residual blocks", AMOUNT)
  num_heads: int = field(4, "heads of a block; they share the width", AMOUNT)
  key_heads: int = field(
    0, "heads of keys and values; 0: as many as of queries", integer(0, 10_001)
  )
  sinks: bool = field(
    False, "a learned logit per head, which takes a share of weights"
  )
  positions: str = field(
    "learned",
    "embeddings, or rotation of queries and keys",
    one_of("learned", "rotary"),
  )
  rotary_base: float = field(10_000.0, "base of rotary positions", POSITIVE)
  width: int = field(256, "width of the residual stream", SIZE)
  half_size: bool = field(
    False, "MLP of 2 * width, not 4; queries and keys of width / 2"
  )
  dropout: float = field(0.0, "rate, where residual branches end", FRACTION)
  token_std: float = field(
    0.013,
    "standard deviation of token embeddings; released for images: 0.01",
  )
  position_std: float = field(0.007, "the same of position embeddings")
  dtype: str = field(
    "float32",
    "of activations; parameters, updates, the residual stream, norms and the"
    " loss are float32, and float16 scales the loss",
    one_of("float32", "bfloat16", "float16"),
  )
  remat: str = field(
    "block", "what the backward pass recomputes", one_of(*REMATS)
  )
  experts: int = field(
    0,
    "MLPs of a mixture in every second block, of which each position passes"
    " through two; 0: no mixtures",
    integer(0, 10_001),
  )


@dataclass(frozen=True, kw_only=True)
class Attention(Group):
  """What attends to what: Child et al. 2019, sections 4.2 and 4.3."""

  pattern: str = field(
    "strided",
    "dense, local, strided, fixed, strided_target, a layout such as gemma3, or"
    ' an expression over the patterns of docs/patterns.md: "BigBird(64)",'
    ' "Local(96) | Global(8)"; "Local(96), Strided(96)" are two factors for'
    " mode to place",
  )
  schedule: str = field(
    "",
    'other patterns after some steps: "8000: strided", or several joined by'
    ' "then"; evaluation uses the last',
  )
  mode: str = field("interleaved", "of factors: interleaved, merged, heads")
  cycle: tuple[int, ...] = field(
    (), "order of interleaved factors; (): 0, 1, ...", items(COUNT)
  )
  stride: int = field(128, "l, for strided; block size, for fixed", SIZE)
  window: int = field(
    128, "keys of local and gpt3, with the query itself", SIZE
  )
  width: int = field(32, "c, for fixed: summary columns of a block", SIZE)
  num_summaries: int = field(1, "distinct summary columns across heads", SIZE)
  backend: str = field("auto", "auto, dense, or the name of an executor")
  tile: int = field(0, "positions in a tile; 0: by pattern and device")


@dataclass(frozen=True, kw_only=True)
class Loss(Group):
  """Losses added to the nats per position, each a mean over its blocks."""

  load_balance: float = field(0.01, "weight of uneven use of experts")
  router_z: float = field(0.001, "weight of squared logits of routers")
  codebook: float = field(0.01, "weight of distances, for Routing")
  span: float = field(1e-6, "weight of the mean span, for AdaptiveSpan")


@dataclass(frozen=True, kw_only=True)
class Optimizer(Group):
  """Updates: Child et al. 2019, section 6; betas and epsilon as released."""

  name: str = field(
    "adamw",
    "muon: Muon for matrices of blocks, Adam for the rest",
    one_of("adamw", "muon"),
  )
  learning_rate: float = field(0.00035, "peak learning rate")
  adam_learning_rate: float = field(0.0, "Adam's beside Muon; 0: the same")
  warmup_steps: int = field(5000, "linear warm-up, before cosine decay to 0")
  beta1: float = field(0.9, "decay of the mean gradient", FRACTION)
  beta2: float = field(0.999, "decay of the mean squared gradient", FRACTION)
  # At 0, weights without gradients become nan.
  epsilon: float = field(1e-8, "added to the root of the mean square", POSITIVE)
  weight_decay: float = field(0.01, "times the learning rate; of matrices only")
  # At 0, nothing is learned.
  clip_norm: float = field(1.0, "largest global norm of the gradient", LIMIT)
  ema_decay: float = field(
    0.999, "decay of the averaged weights, which are scored", SHARE
  )


@dataclass(frozen=True, kw_only=True)
class Train(Group):
  """Steps and batches."""

  # JAX ignores the upper bits of larger seeds.
  seed: int = field(0, "for weights, data order, dropout", integer(0, 2**32))
  steps: int = field(100_000, "updates; 0: saves the initial weights")
  batch_size: int = field(16, "sequences of an update, over all devices", SIZE)
  init_from: str = field(
    "",
    "run whose averaged weights this one starts from: WORKDIR, WORKDIR:STEP"
    " or WORKDIR:best, or a file of export; empty: random weights",
  )
  init_partial: bool = field(
    False, "keep random weights where those of init_from do not fit"
  )
  accumulation: int = field(1, "micro-batches per update", SIZE)
  log_every: int = field(50, "steps between lines of metrics")
  nonfinite: str = field(
    "stop",
    "what follows a step with a non-finite loss or gradient: no weights change",
    one_of("stop", "skip"),
  )
  max_skipped: int = field(10, "batches skipped in a row before stopping")


@dataclass(frozen=True, kw_only=True)
class Eval(Group):
  """Scores in training, and the batches of `eval.py`."""

  every: int = field(2000, "steps between validations; 0: after the last")
  batch_size: int = field(16, "sequences of a batch", SIZE)
  sequences: int = field(256, "validation sequences during training; 0: all")
  samples: int = field(0, "sequences to sample at each validation; 0: none")


@dataclass(frozen=True, kw_only=True)
class Checkpoint(Group):
  """What is saved."""

  every: int = field(2000, "steps between checkpoints; 0: after the last")
  keep: int = field(2, "latest checkpoints to keep", SIZE)
  keep_best: int = field(1, "best checkpoints to keep, by validation loss")


@dataclass(frozen=True, kw_only=True)
class Mesh(Group):
  """The devices along each axis."""

  data: int = field(-1, "devices that split the batch", DEVICES)
  fsdp: int = field(1, "devices that split batch, weights, optimizer", DEVICES)
  sequence: int = field(1, "devices that split positions", DEVICES)
  tensor: int = field(1, "devices that split heads and MLPs", DEVICES)


@dataclass(frozen=True, kw_only=True)
class Config(Group):
  """The config of an experiment."""

  data: Data = Data()
  model: Model = Model()
  attention: Attention = Attention()
  loss: Loss = Loss()
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

    Raises:
      ValueError: a field is unknown, or cannot have its value.
    """
    groups = self.to_dict()
    for name, value in values.items():
      if name not in FIELDS:
        raise ValueError(
          f"the config has no field {name}; docs/config.md lists all"
        )
      value = tuple(value) if isinstance(value, list) else value
      check_value(name, value)
      group, _, field = name.partition(".")
      groups[group][field] = value
    return type(self)(**{k: GROUPS[k](**groups[k]) for k in groups})


GROUPS: dict[str, Any] = {x.name: x.type for x in dataclasses.fields(Config)}
FIELDS = {
  f"{group}.{x.name}": x
  for group, kind in GROUPS.items()
  for x in dataclasses.fields(kind)
}


def typed(config: Any) -> Config:
  """The `Config` that a ConfigDict stands for; defaults of what it lacks.

  Raises:
    ValueError: a field is unknown or invalid; the message names it, its value
      and its rule.
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


def check_value(name: str, value: object) -> None:
  """Raises ValueError unless a field, "group.name", may have this value."""
  rule = FIELDS[name].metadata["rule"]
  if not rule.accepts(value):
    try:
      shown = reprlib.repr(value)
    except ValueError:  # Python prints no integers of more than 4,300 digits
      shown = "(an integer too long to print)"
    raise ValueError(f"{name}={shown} must be {rule.text}")


def flatten(config: Any) -> dict[str, Any]:
  """{"group.name": value} of a `Config` or a ConfigDict."""
  return {
    f"{group}.{name}": value
    for group, fields in config.to_dict().items()
    for name, value in fields.items()
  }


def table() -> list[tuple[str, str, str, str]]:
  """(name, default, meaning, values allowed) of all fields, as text."""
  return [
    (name, repr(x.default), x.metadata["about"], x.metadata["rule"].text)
    for name, x in FIELDS.items()
  ]
