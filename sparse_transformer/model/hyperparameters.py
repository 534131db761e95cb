"""The typed config of a network, and how an experiment's config becomes one."""

import dataclasses
import functools
import itertools
import re
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import patterns as patterns_lib


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that defines a network.

  The fields without a comment are the group `model` of a config, see
  `schema.Model`; `backend` and `tile` are as in `attention.attend`.

  Raises:
    ValueError: the heads do not divide the widths, no block has the experts, or
      the task does not fit the data.
  """

  vocab_size: int  # number of symbols, V
  length: int  # positions, n; one more than symbols if `prepends`
  # Sizes of the position embeddings: rows, columns and possibly channels.
  shape: tuple[int, ...]
  # What attends to what: a tuple (layers) of tuples (heads).
  patterns: tuple[tuple[patterns_lib.Pattern, ...], ...]
  num_layers: int
  num_heads: int
  width: int
  half_size: bool
  dropout: float
  init: str
  token_std: float
  position_std: float
  dtype: str
  remat: str
  backend: str = "auto"
  tile: int = 0
  experts: int = 0
  experts_per_token: int = 2
  experts_every: int = 2
  key_heads: int = 0
  sinks: bool = False
  positions: str = "learned"
  rotary_base: float = 10_000.0
  # The symbol that ends a document, none of whose positions attend to another
  # document's; None if sequences are not made of documents.
  separator: int | None = None
  task: str = "generate"
  pool: str = "first"
  classes: int = 0  # number of labels of the data, 0 without labels

  def __post_init__(self) -> None:
    if self.classifies and not self.classes:
      raise ValueError(
        f"model.task={self.task}, but the data have no labels; set data.name to"
        " a source with labels, such as labelled or cifar10_gray"
      )
    if self.num_heads % self.num_key_heads:
      raise ValueError(
        f"model.key_heads={self.key_heads} must divide model.num_heads="
        f"{self.num_heads}, or be 0 for as many"
      )
    if self.qk_width % self.num_heads or self.width % self.num_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads} must divide model.width="
        f"{self.width} and the width {self.qk_width} of queries and keys"
      )
    if self.positions != "learned" and self.qk_width // self.num_heads % 2:
      raise ValueError(
        f"model.positions={self.positions} rotates pairs of numbers, but heads"
        f" have queries of {self.qk_width // self.num_heads}; change"
        " model.width or model.num_heads"
      )
    if self.experts and self.experts_per_token > self.experts:
      raise ValueError(
        f"model.experts_per_token={self.experts_per_token} must be at most"
        f" model.experts={self.experts}"
      )
    if self.experts and self.experts_every > self.num_layers:
      raise ValueError(
        f"model.experts={self.experts}, but no block has them: set"
        f" model.experts_every={self.experts_every} to at most"
        f" model.num_layers={self.num_layers}"
      )

  @property
  def classifies(self) -> bool:
    """Whether the network predicts a label of the sequence."""
    return self.task == "classify"

  @property
  def prepends(self) -> bool:
    """Whether all symbols follow the start, from which labels are predicted."""
    return self.classifies and self.pool == "first"

  @property
  def num_symbols(self) -> int:
    """Symbols in a sequence, at most."""
    return self.length - self.prepends

  @property
  def outputs(self) -> int:
    """Width of the output layer: symbols, or classes."""
    return self.classes if self.classifies else self.vocab_size

  @property
  def row_length(self) -> int:
    """Integers of an example, see `Sequences.examples`."""
    return self.num_symbols + 2 * self.classifies

  @property
  def qk_width(self) -> int:
    """Width of the queries and keys of all heads together."""
    return self.width // 2 if self.half_size else self.width

  @property
  def num_key_heads(self) -> int:
    """Heads of keys and values, G."""
    return self.key_heads or self.num_heads

  def rotates(self, layer: int) -> bool:
    """Whether the queries and keys of a layer have rotary positions."""
    dense = patterns_lib.Causal(), patterns_lib.Full()
    is_dense = all(p in dense for p in self.patterns[layer])
    return self.positions == "rotary" or (
      self.positions == "rotary_local" and not is_dense
    )

  @property
  def mlp_width(self) -> int:
    """Inner width of the MLP, F."""
    return self.width * (2 if self.half_size else 4)

  @functools.cached_property
  def has_experts(self) -> tuple[bool, ...]:
    """For each block, whether it has a mixture of experts."""
    return tuple(
      self.experts > 0 and layer % self.experts_every == 0
      for layer in range(1, self.num_layers + 1)
    )

  @property
  def axes(self) -> tuple[int, ...]:
    """Sizes of the position-embedding axes: the sizes in `shape` above 1."""
    return tuple(size for size in self.shape if size > 1) or (1,)

  @property
  def period(self) -> int:
    """The smallest number of layers after which patterns and MLPs repeat."""
    layers = tuple(zip(self.patterns, self.has_experts, strict=True))
    return next(
      period
      for period in range(1, len(layers) + 1)
      if all(a == b for a, b in zip(layers, layers[period:], strict=False))
    )


def schedule(config: ConfigDict) -> dict[int, str]:
  """The patterns of an experiment, each by the step from which it is used.

  Raises:
    ValueError: `attention.schedule` cannot be read, or its steps are not above
      0, ascending and below `train.steps`.
  """
  attention, found = config.attention, {0: config.attention.pattern}
  if not attention.schedule:
    return found
  for phase in re.split(r"\bthen\b", attention.schedule):
    step, colon, pattern = (x.strip() for x in phase.partition(":"))
    if not (colon and pattern and re.fullmatch(r"\d{1,10}", step, re.ASCII)):
      raise ValueError(
        f"attention.schedule={patterns_lib.shorten(attention.schedule)!r} must"
        ' be like "8000: strided", or several of these joined by "then"'
      )
    if int(step) <= max(found):
      raise ValueError(
        f"attention.schedule: step {step} must be above {max(found)}, from"
        " which the pattern before it is used"
      )
    found[int(step)] = pattern
  if 0 < config.train.steps <= max(found):
    raise ValueError(
      f"attention.schedule: step {max(found)} must be below"
      f" train.steps={config.train.steps}"
    )
  return found


def configure(config: ConfigDict, source: Any) -> Config:
  """Makes the network config of an experiment, with the last of its patterns.

  A classifier has named patterns in their bidirectional form; if it predicts
  from the start, this sees all, and is seen by all.

  Args:
    config: the experiment's; its groups `model` and `attention` are used.
    source: the data source, of which vocab_size, length, shape, separator and
      classes are used.

  Raises:
    ValueError: if the settings contradict each other or the data, or if a
      pattern is not well defined (see `Pattern.check`), has no pairs, or lets a
      query see a later key, except in a classifier.
  """
  settings = dict(config.attention)
  backend, tile = settings.pop("backend"), settings.pop("tile")
  del settings["pattern"], settings["schedule"]
  name, mode = [*schedule(config).values()][-1], settings.pop("mode")
  length = num_positions(config.model, source)
  for field in ("stride", "window"):
    if settings[field] > source.length and name in patterns_lib.FACTORIZATIONS:
      raise ValueError(
        f"attention.{field}={settings[field]} must lie between 1 and the"
        f" {source.length} positions of a sequence"
      )
  patterns = patterns_lib.assign(
    name,
    mode,
    num_layers=config.model.num_layers,
    num_heads=config.model.num_heads,
    length=length,
    **settings,
  )
  is_named = name in (
    *patterns_lib.FACTORIZATIONS,
    *patterns_lib.PUBLISHED,
  )
  if config.model.task == "classify" and is_named:
    start = length - source.length

    def convert(pattern):
      pattern = patterns_lib.bidirectional(pattern)
      return patterns_lib.prefixed(pattern, start) if start else pattern

    patterns = tuple(tuple(map(convert, heads)) for heads in patterns)
  network = Config(
    vocab_size=source.vocab_size,
    length=length,
    shape=tuple(source.shape),
    patterns=patterns,
    backend=backend,
    tile=tile,
    separator=source.separator,
    classes=len(source.classes),
    **config.model,
  )
  for pattern in dict.fromkeys(itertools.chain(*patterns[: network.period])):
    pattern.check(length)
    _check_use(pattern, length, not network.classifies)
    _check_options(network, pattern)
  return network


def num_positions(settings: ConfigDict, source: Any) -> int:
  """Positions of a network with these settings, the group `model`."""
  prepends = settings.task == "classify" and settings.pool == "first"
  return source.length + prepends


def _check_options(network: Config, pattern: patterns_lib.Pattern) -> None:
  """Raises a ValueError if a pattern cannot have some options of a network."""
  shares = [
    content for content in pattern.contents() if content.keys_are_queries
  ]
  if not shares:
    return
  name = patterns_lib.shorten(shares[0])
  if network.num_key_heads < network.num_heads:
    raise ValueError(
      f"{name} has queries for keys: it needs as many heads of keys as of"
      f" queries; leave out model.key_heads={network.key_heads}"
    )
  if network.positions != "learned":
    raise ValueError(
      f"{name} groups queries whatever their positions: it needs"
      f" model.positions=learned, not {network.positions}"
    )


def _check_use(
  pattern: patterns_lib.Pattern, length: int, is_causal: bool
) -> None:
  """Raises a ValueError if a pattern has no pairs, or must be causal."""
  name = patterns_lib.shorten(pattern)
  for content in pattern.contents():
    if not content.most_keys(length):
      raise ValueError(
        f"attention.pattern {name}: {patterns_lib.shorten(content)} can have no"
        f" pairs among {length} positions"
      )
  for part in pattern.split()[1]:
    if isinstance(part, patterns_lib.Difference) and part.left == part.right:
      raise ValueError(
        f"attention.pattern {name} has no pairs: it subtracts"
        f" {patterns_lib.shorten(part.left)} from itself"
      )
  pattern = pattern.support()
  if not patterns_lib.has_pairs(pattern, length):
    raise ValueError(
      f"attention.pattern {name} has no pairs: none of the {length} queries"
      " attends to a key"
    )
  if is_causal and (leak := patterns_lib.first_leak(pattern, length)):
    raise ValueError(
      f"attention.pattern {name} lets query {leak[0]} see the later key"
      f" {leak[1]}, but each position is predicted from earlier ones only;"
      f" use ({name}) & Causal()"
    )
