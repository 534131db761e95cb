"""The fields of a config: default, values allowed, and meaning, in one table.

The config, its checks, `--help` and docs/config.md come from this table. What
depends on several fields, on the data or on the devices is checked where it is
used, and so are the names of data sources, patterns, modes and backends, to
which other code can add.
"""

import dataclasses
import math
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
  """The values that a field may have."""

  text: str  # the end of the error message "... must be ..."
  accepts: Callable[[Any], bool]  # whether a value is allowed


def number(bounds: str, is_within: Callable[[Any], bool]) -> Rule:
  """A finite number within bounds in float32, in which 0.99999999 is 1."""

  def accepts(value):
    if type(value) is int and abs(value) < 2**31:
      value = float(value)
    if not isinstance(value, float) or not abs(value) <= LARGEST:
      return False
    return is_within(np.float32(value))

  return Rule(f"a finite number {bounds}", accepts)


def or_infinite(rule: Rule) -> Rule:
  """A rule that also allows infinity, which switches a limit off."""
  return Rule(
    f"{rule.text}, or infinite",
    lambda value: value == math.inf or rule.accepts(value),
  )


def integer(at_least: int, *, below: int = 2**31) -> Rule:
  """An integer within bounds; devices count in 32 bits."""
  return Rule(
    f"an integer at least {at_least} and below {below:,}",
    lambda value: type(value) is int and at_least <= value < below,
  )


def name(*known: str) -> Rule:
  """One of the known names."""
  accepts = lambda value: isinstance(value, str) and value in known
  return Rule(f"one of {', '.join(known)}", accepts)


def items(rule: Rule) -> Rule:
  """A tuple or a list of any length whose items follow a rule."""
  return Rule(
    f"a tuple, each item {rule.text}",
    lambda value: (
      isinstance(value, tuple | list) and all(map(rule.accepts, value))
    ),
  )


TEXT = Rule("a string", lambda value: isinstance(value, str))
SWITCH = Rule("True or False", lambda value: isinstance(value, bool))
COUNT, SIZE = integer(0), integer(1)
# A network has a Python object for each head of each layer. Published networks
# have about a hundred layers, and as many heads.
AMOUNT, AMOUNT_OR_0 = integer(1, below=10_001), integer(0, below=10_001)
RATE = integer(1, below=1_000_001)  # no sound has more samples per second
SYMBOLS = integer(2, below=257)  # a byte
PAIRS = integer(1, below=128)  # a byte is a key, a value or blank
SEED = integer(0, below=2**32)  # JAX ignores the upper bits of larger seeds
POSITIVE = number("above 0", lambda x: x > 0)
NOT_NEGATIVE = number("at least 0", lambda x: x >= 0)
FRACTION = number("at least 0 and below 1", lambda x: 0 <= x < 1)
SHARE = number("at least 0 and at most 1", lambda x: 0 <= x <= 1)
SHARES = Rule(
  "three numbers above 0 that sum to 1",
  lambda x: (
    items(POSITIVE).accepts(x) and len(x) == 3 and math.isclose(sum(x), 1)
  ),
)
SIZES = Rule(
  "three integers at least 1",
  lambda x: items(SIZE).accepts(x) and len(x) == 3,
)
DEVICES = Rule(
  "an integer at least 1, or -1 for all remaining devices",
  lambda value: integer(-1).accepts(value) and value != 0,
)


@dataclasses.dataclass(frozen=True)
class Field:
  """A field of a config."""

  default: Any  # its value unless a config sets it
  rule: Rule  # the values that it may have
  about: str  # its meaning, unit and source


GROUPS: dict[str, dict[str, Field]] = dict(
  data=dict(
    name=Field(
      "digits",
      TEXT,
      "digits, cifar10, imagenet64, images, stdlib, bytes, jsonl, tokens,"
      " enwik8, text8, fasta, audio, repeat, recall; with labels: cifar10_gray,"
      " labelled, listops",
    ),
    path=Field("", TEXT, "file or folder; empty: the data set's default place"),
    length=Field(1024, SIZE, "symbols in a sequence; images have their own"),
    documents=Field(
      False,
      SWITCH,
      "of bytes, jsonl and fasta: a separator ends each file or record, and"
      " nothing attends across",
    ),
    columns=Field(
      128, SIZE, "of the table by whose rows and columns text is embedded"
    ),
    fractions=Field(
      (0.9, 0.05, 0.05),
      SHARES,
      "train, validation, test of stdlib, bytes, jsonl, tokens, fasta, audio,"
      " images and labelled, unless files or folders are named train,"
      " val and test",
    ),
    vocab_size=Field(256, integer(2), "of tokens, all of which are below it"),
    rate=Field(12_000, RATE, "samples per second to which audio is converted"),
    symbols=Field(16, SYMBOLS, "of repeat, all equally likely"),
    period=Field(256, SIZE, "positions from a symbol to its copy, of repeat"),
    noise=Field(0.0, SHARE, "probability that repeat draws a copy anew"),
    pairs=Field(16, PAIRS, "keys, each with a value, of recall"),
    sizes=Field(
      (96_000, 2_000, 2_000),
      SIZES,
      "train, validation, test of listops, in examples",
    ),
  ),
  model=dict(
    task=Field(
      "generate",
      name("generate", "classify"),
      "predicts each symbol from those before it, or the label of a sequence,"
      " whose positions may all see each other",
    ),
    pool=Field(
      "first",
      name("first", "mean"),
      "what classify predicts from: the first position, or the mean of all",
    ),
    num_layers=Field(8, AMOUNT, "residual blocks"),
    num_heads=Field(4, AMOUNT, "heads of each block; they share the width"),
    key_heads=Field(
      0, AMOUNT_OR_0, "heads of keys and values; 0: as many as of queries"
    ),
    sinks=Field(
      False, SWITCH, "a learned logit per head, which takes a share of weights"
    ),
    positions=Field(
      "learned",
      name("learned", "rotary", "rotary_local"),
      "embedded, or by rotating queries and keys; rotary_local: not in layers"
      " with dense attention",
    ),
    rotary_base=Field(10_000.0, POSITIVE, "of rotary positions"),
    width=Field(256, SIZE, "width of the residual stream"),
    half_size=Field(
      False, SWITCH, "MLP of 2 * width, not 4; queries and keys of width / 2"
    ),
    dropout=Field(0.0, FRACTION, "at the end of the two residual branches"),
    init=Field(
      "code",
      name("code", "paper"),
      "weights as in the released code, or as printed: 2.83 times smaller",
    ),
    token_std=Field(
      0.013,
      NOT_NEGATIVE,
      "standard deviation of token embeddings with init=code; released for"
      " images: 0.01",
    ),
    position_std=Field(0.007, NOT_NEGATIVE, "the same, of position embeddings"),
    dtype=Field(
      "float32",
      name("float32", "bfloat16", "float16"),
      "of activations; parameters, updates, the residual stream, norms and the"
      " loss are float32, and float16 scales the loss",
    ),
    remat=Field("block", name(*REMATS), "what the backward pass recomputes"),
    experts=Field(0, AMOUNT_OR_0, "MLPs of a mixture; 0: no mixtures"),
    experts_per_token=Field(2, AMOUNT, "experts each position passes through"),
    experts_every=Field(2, AMOUNT, "every n-th block has a mixture of experts"),
  ),
  # Child et al. 2019, sections 4.2 and 4.3.
  attention=dict(
    pattern=Field(
      "strided",
      TEXT,
      "dense, local, strided, fixed, strided_target, a layout such as"
      " gemma3, or an expression over the"
      ' patterns of docs/patterns.md: "BigBird(64)", "Local(96) | Global(8)";'
      ' "Local(96), Strided(96)" are two factors for mode to place',
    ),
    schedule=Field(
      "",
      TEXT,
      'other patterns after some steps: "8000: strided", or several joined by'
      ' "then"; evaluation uses the last',
    ),
    mode=Field("interleaved", TEXT, "of factors: interleaved, merged, heads"),
    cycle=Field((), items(COUNT), "factors of the layers; (): 0, 1, ..."),
    stride=Field(128, SIZE, "l, for strided; block size, for fixed"),
    window=Field(
      128, SIZE, "keys of local and gpt3, including the query itself"
    ),
    width=Field(32, SIZE, "c, for fixed: summary columns of a block"),
    num_summaries=Field(1, SIZE, "distinct summary columns across heads"),
    backend=Field("auto", TEXT, "auto, dense, or the name of an executor"),
    tile=Field(0, COUNT, "positions in a tile; 0: by pattern and device"),
  ),
  # Losses that are added to the nats per position in training; each is a mean
  # over the blocks that have it.
  loss=dict(
    load_balance=Field(0.01, NOT_NEGATIVE, "weight of uneven use of experts"),
    router_z=Field(0.001, NOT_NEGATIVE, "weight of squared logits of routers"),
    codebook=Field(0.01, NOT_NEGATIVE, "weight of distances, for Routing"),
    span=Field(1e-6, NOT_NEGATIVE, "weight of the mean span, for AdaptiveSpan"),
  ),
  # Child et al. 2019, section 6; betas and epsilon as released.
  optimizer=dict(
    name=Field(
      "adamw",
      name("adamw", "muon"),
      "muon: Muon for matrices of blocks, Adam for the rest",
    ),
    learning_rate=Field(0.00035, NOT_NEGATIVE, "peak"),
    adam_learning_rate=Field(
      0.0, NOT_NEGATIVE, "Adam's rate, with Muon; 0: the same"
    ),
    warmup_steps=Field(5000, COUNT, "linear from 0; then cosine to 0"),
    beta1=Field(0.9, FRACTION, "decay of the mean gradient"),
    beta2=Field(0.999, FRACTION, "decay of the mean squared gradient"),
    # At 0, weights without gradients become nan.
    epsilon=Field(1e-8, POSITIVE, "added to the root of the mean square"),
    weight_decay=Field(0.01, NOT_NEGATIVE, "times learning_rate; on matrices"),
    # At 0, nothing is learned.
    clip_norm=Field(1.0, or_infinite(POSITIVE), "global norm of the gradient"),
    ema_decay=Field(0.999, SHARE, "decay of the weights that are evaluated"),
  ),
  train=dict(
    seed=Field(0, SEED, "of weights, data order and dropout"),
    steps=Field(100_000, COUNT, "updates; 0: saves the initial weights"),
    batch_size=Field(16, SIZE, "sequences of one update, over all devices"),
    init_from=Field(
      "",
      TEXT,
      "run whose averaged weights this one starts from: WORKDIR, WORKDIR:STEP"
      " or WORKDIR:best, or a file of export; empty: random weights",
    ),
    init_partial=Field(
      False, SWITCH, "keep random weights where those of init_from do not fit"
    ),
    accumulation=Field(1, SIZE, "micro-batches per update"),
    log_every=Field(50, COUNT, "steps between lines of metrics"),
    nonfinite=Field(
      "stop",
      name("stop", "skip"),
      "a step whose loss or gradients are not finite, which changes no weights",
    ),
    max_skipped=Field(10, COUNT, "batches skipped in a row before stopping"),
  ),
  eval=dict(
    every=Field(2000, COUNT, "steps between validations; 0: after the last"),
    batch_size=Field(16, SIZE, "sequences"),
    sequences=Field(256, COUNT, "validation sequences during training; 0: all"),
    samples=Field(0, COUNT, "sequences to sample at each validation; 0: none"),
  ),
  checkpoint=dict(
    every=Field(2000, COUNT, "steps between checkpoints; 0: after the last"),
    keep=Field(2, SIZE, "latest checkpoints to keep"),
    keep_best=Field(1, COUNT, "best checkpoints to keep, by validation loss"),
  ),
  mesh=dict(
    data=Field(-1, DEVICES, "devices that split the batch"),
    fsdp=Field(1, DEVICES, "devices that split batch, weights and optimizer"),
    sequence=Field(1, DEVICES, "devices that split positions"),
    tensor=Field(1, DEVICES, "devices that split heads and MLPs"),
  ),
)
FIELDS = {
  f"{group}.{name}": field
  for group, fields in GROUPS.items()
  for name, field in fields.items()
}


def table() -> list[tuple[str, str, str, str]]:
  """(name, default, meaning, values allowed) of all fields, as text."""
  return [
    (name, repr(field.default), field.about, field.rule.text)
    for name, field in FIELDS.items()
  ]


def check(config: ConfigDict) -> None:
  """Checks that a config has exactly the known fields, with valid values.

  Raises:
    ValueError: a field is missing, unknown or invalid; the message names
      fields, values and rules.
  """
  values = flatten(config)
  problems = []
  for verb, some, others in (
    ("lacks", FIELDS, values),
    ("has unknown", values, FIELDS),
  ):
    if fields := [field for field in some if field not in others]:
      more = " ..." if len(fields) > 3 else ""
      problems.append(f"{verb} {', '.join(fields[:3])}{more}")
  if problems:
    raise ValueError(
      f"the config {' and '.join(problems)}; docs/config.md lists all fields"
    )
  for field, value in values.items():
    check_value(field, value)


def check_value(field: str, value: object) -> None:
  """Raises ValueError unless a field, "group.name", may have this value."""
  if not FIELDS[field].rule.accepts(value):
    try:
      shown = reprlib.repr(value)
    except ValueError:  # Python prints no integers of more than 4,300 digits
      shown = "(an integer too long to print)"
    raise ValueError(f"{field}={shown} must be {FIELDS[field].rule.text}")


def flatten(config: ConfigDict) -> dict[str, Any]:
  """{"group.name": value}, lists as tuples; {"name": value} outside groups."""
  if not isinstance(config, ConfigDict):
    raise ValueError(
      f"the config is of type {type(config).__name__}, but must be a ConfigDict"
      " with the fields of docs/config.md"
    )
  try:
    groups = config.to_dict()
  except config_dict.RequiredValueError:
    raise ValueError("a required field of the config has no value") from None
  values: dict[str, Any] = {}
  for group, content in groups.items():
    if isinstance(content, dict) and (content or group in GROUPS):
      values |= {
        f"{group}.{name}": tuple(value) if isinstance(value, list) else value
        for name, value in content.items()
      }
    else:
      values[group] = content
  return values
