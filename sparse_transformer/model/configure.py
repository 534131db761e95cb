"""The typed config of a network, made from the config of an experiment."""

import dataclasses
import itertools
from typing import Any

from sparse_transformer import patterns as patterns_lib, schema
from sparse_transformer.patterns import Pattern, shorten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(schema.Model):
  """Everything that defines a network: its settings, patterns and data.

  The config is hashable, because programs and values derived from it are
  cached.

  Raises:
    ValueError: settings contradict each other, or do not fit the patterns or
      the data.
  """

  vocab_size: int  # number of symbols, V
  length: int  # symbols in a sequence, n
  # shape of the data: rows, columns and possibly channels
  shape: tuple[int, ...]
  patterns: tuple[tuple[Pattern, ...], ...]  # by layer, then by head
  backend: str = "auto"  # `backend` and `tile` are as in `attention.attend`
  tile: int = 0
  # The symbol that ends a document. Positions attend only within their
  # document.
  separator: int | None = None
  classes: int = 0  # number of classes of labelled data, or 0
  arrangement: Any = ()  # arrangement of the data, see `data.arrangements`

  def __post_init__(self) -> None:
    # Check that the data and the patterns fit.
    if self.classifies and not self.classes:
      raise ValueError(
        f"model.task={self.task}, but the data have no labels; set data.name to"
        " a source with labels, such as labelled or cifar10_gray"
      )
    if self.classes and not self.classifies:
      raise ValueError(
        f"model.task={self.task}, but the data have labels; set"
        " model.task=classify, or set data.name=bytes to read the files of"
        " data.name=labelled without their labels"
      )
    if self.max_span and self.contents:
      raise ValueError(
        f"model.max_span={self.max_span} needs static patterns, not"
        f" {shorten(next(iter(self.contents)))}"
      )
    for content in self.contents:
      if content.blocks_from == "caller":
        raise ValueError(
          f"{shorten(content)} needs blocks, which a network does not have; use"
          " it with attend only"
        )

    # Check the widths, which heads divide into equal parts.
    if self.num_heads % self.num_key_heads:
      raise ValueError(
        f"model.key_heads={self.key_heads} must divide model.num_heads="
        f"{self.num_heads}, or be 0 for one per query head"
      )
    if self.qk_width % self.num_heads or self.width % self.num_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads} must divide model.width="
        f"{self.width} and the width {self.qk_width} of queries and keys"
      )
    if self.positions == "rotary" and self.head_width % 2:
      raise ValueError(
        f"model.positions={self.positions} rotates pairs of numbers, but the"
        f" width {self.head_width} of a head is odd; change model.width or"
        " model.num_heads"
      )

    # If queries are used as keys, there must be as many KV heads as query
    # heads, and positions must not rotate keys.
    shared = [c for c in self.contents if c.keys_are_queries]
    is_grouped = self.num_key_heads < self.num_heads
    if shared and (is_grouped or self.positions != "learned"):
      raise ValueError(
        f"{shorten(shared[0])} uses queries as keys, so it needs"
        " model.key_heads=0 and model.positions=learned, not"
        f" {self.key_heads} and {self.positions}"
      )

  @property
  def classifies(self) -> bool:
    """Whether the network predicts a label instead of the next symbol."""
    return self.task == "classify"

  @property
  def outputs(self) -> int:
    """Width of the output layer: the number of symbols, or of classes."""
    return self.classes if self.classifies else self.vocab_size

  @property
  def row_length(self) -> int:
    """Number of integers in an example.

    See `Sequences.examples` and `Arrangement.arrange`.
    """
    return self.length + 2 * self.classifies + len(self.arrangement)

  @property
  def qk_width(self) -> int:
    """Width of the queries and keys of all heads together."""
    return self.width // 2 if self.half_size else self.width

  @property
  def head_width(self) -> int:
    """Width of a head's queries and keys, K."""
    return self.qk_width // self.num_heads

  @property
  def widths(self) -> tuple[int, int]:
    """(K, E): widths of a head's queries and keys, and of its values."""
    return self.head_width, self.width // self.num_heads

  @property
  def num_key_heads(self) -> int:
    """Number of KV heads, G."""
    return self.key_heads or self.num_heads

  @property
  def contents(self) -> dict[Any, None]:
    """The content-based patterns of all heads, without repetitions."""
    heads = itertools.chain.from_iterable(self.patterns)
    return dict.fromkeys(c for pattern in heads for c in pattern.contents())

  @property
  def axes(self) -> tuple[int, ...]:
    """Sizes of the tables of position embeddings, or ()."""
    # An axis of size 1 has no table, because it would only add the same vector
    # to all positions.
    axes = tuple(size for size in self.shape if size > 1) or (1,)
    return axes if self.positions == "learned" else ()


def configure(config: schema.Config, source: Any) -> Config:
  """Makes the network config of an experiment.

  For a classifier, named patterns are used in their bidirectional form.

  Args:
    config: config of the experiment, whose groups `model` and `attention` are
      used.
    source: source of data, whose vocab_size, length, shape, separator, classes
      and arrangement are used.

  Raises:
    ValueError: settings contradict each other or the data, or a pattern is not
      well defined, has no pairs, or sees later keys although the network
      predicts symbols.
  """
  network = Config(
    vocab_size=source.vocab_size,
    length=source.length,
    shape=tuple(source.shape),
    patterns=_assign(config, source.length),
    backend=config.attention.backend,
    separator=source.separator,
    classes=len(source.classes),
    arrangement=source.arrangement,
    **config.model,
  )

  # Most layers share their patterns, so each distinct pattern is checked once.
  heads = itertools.chain.from_iterable(network.patterns)
  for pattern in dict.fromkeys(heads):
    _check(pattern, network.length, is_causal=not network.classifies)
  return network


def _assign(config, length):
  """Assigns patterns to layers and heads.

  For a classifier, named patterns are made bidirectional. Patterns in
  expressions are used as they are written.
  """
  settings = config.attention
  name = settings.pattern

  # Check only settings that the named pattern uses.
  factors = patterns_lib.FACTORIZATIONS.get(name, "")
  for field in ("stride", "window"):
    if settings[field] > length and f"{{{field}}}" in factors:
      raise ValueError(
        f"attention.{field}={settings[field]} must lie between 1 and the"
        f" {length} positions of a sequence"
      )

  layers = patterns_lib.assign(
    name,
    settings.mode,
    num_layers=config.model.num_layers,
    num_heads=config.model.num_heads,
    cycle=settings.cycle,
    stride=settings.stride,
    window=settings.window,
    width=settings.width,
    num_summaries=settings.num_summaries,
  )

  is_named = factors or name in patterns_lib.PUBLISHED
  if config.model.task == "classify" and is_named:
    convert = patterns_lib.bidirectional
    layers = tuple(tuple(map(convert, heads)) for heads in layers)
  return layers


def _check(pattern, length, is_causal):
  """Checks that a pattern can be used in training.

  The pattern must have at least one pair. If the network predicts symbols, the
  pattern must also be causal: a single leak would let the network read the
  symbol that it should predict.
  """
  pattern.check(length)
  name = f"attention.pattern {shorten(pattern)}"
  for content in pattern.contents():
    if not content.most_keys(length):
      raise ValueError(
        f"{name}: {shorten(content)} has no pairs among {length} positions"
      )

  if not patterns_lib.has_pairs(pattern, length):
    raise ValueError(
      f"{name} has no pairs: none of the {length} queries attends to a key"
    )

  if is_causal and (leak := patterns_lib.first_leak(pattern, length)):
    query, key = leak
    raise ValueError(
      f"{name} lets query {query} see the later key {key}, but each"
      " position is predicted from earlier ones only; use"
      f" ({shorten(pattern)}) & Causal()"
    )
