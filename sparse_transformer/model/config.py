"""The typed config of a network, and how an experiment's config becomes one."""

import dataclasses
import itertools
from typing import Protocol

from ml_collections import ConfigDict

from sparse_transformer import patterns as patterns_lib

INITS = ("code", "paper")
# What the backward pass recomputes, from the least to the most.
REMATS = ("none", "attention", "block_but_attention", "block")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Config:
  """Everything that defines a network.

  Args:
    vocab_size: number of symbols, V.
    length: positions in a sequence, n.
    shape: geometry of the position embeddings: (rows, columns) or (rows,
      columns, channels).
    patterns: what attends to what: a tuple (layers) of tuples (heads).
    num_layers: number of residual blocks, N.
    num_heads: heads of each block, H; they share `width`.
    width: width of the residual stream, D.
    half_size: whether queries and keys have half the width, and the MLP twice
      instead of four times the width.
    dropout: dropout rate at the end of both residual branches, in [0, 1).
    init: standard deviations of the weights: those of the released "code", or
      those of the "paper", which are 2.83 times smaller.
    token_std: standard deviation of the token embedding with init="code".
    position_std: that of the sum of the position embeddings.
    dtype: dtype of activations; parameters and logits are float32.
    remat: what the backward pass recomputes, one of `REMATS`.
    backend: executor of attention, see `attention.attend`.
    tile: positions on a side of a tile of attention; 0 chooses automatically.

  Raises:
    ValueError: if a field is out of range, or the heads do not divide the
      widths.
  """

  vocab_size: int
  length: int
  shape: tuple[int, ...]
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

  def __post_init__(self) -> None:
    for field in ("num_layers", "num_heads", "width", "length"):
      if getattr(self, field) < 1:
        raise ValueError(
          f"model.{field} must be at least 1, got {getattr(self, field)}"
        )
    if self.qk_width % self.num_heads or self.width % self.num_heads:
      raise ValueError(
        f"model.num_heads={self.num_heads} must divide model.width="
        f"{self.width} and the width {self.qk_width} of queries and keys"
      )
    if not 0 <= self.dropout < 1:
      raise ValueError(f"model.dropout={self.dropout} must lie in [0, 1)")
    for field, known in (("init", INITS), ("remat", REMATS), ("dtype", DTYPES)):
      if getattr(self, field) not in known:
        raise ValueError(
          f"unknown model.{field} {getattr(self, field)!r}; known:"
          f" {', '.join(known)}"
        )

  @property
  def qk_width(self) -> int:
    """Width of the queries and keys of all heads together."""
    return self.width // 2 if self.half_size else self.width

  @property
  def mlp_width(self) -> int:
    """Inner width of the MLP, F."""
    return self.width * (2 if self.half_size else 4)

  @property
  def axes(self) -> tuple[int, ...]:
    """Sizes of the position-embedding axes: those of `shape` above 1."""
    return tuple(size for size in self.shape if size > 1) or (1,)

  @property
  def period(self) -> int:
    """The smallest number of layers after which the patterns repeat."""
    layers = self.patterns
    return next(
      period
      for period in range(1, len(layers) + 1)
      if all(a == b for a, b in zip(layers, layers[period:], strict=False))
    )


class Source(Protocol):
  """What a network needs to know about a data source."""

  @property
  def vocab_size(self) -> int: ...

  @property
  def length(self) -> int: ...

  @property
  def shape(self) -> tuple[int, ...]: ...


def configure(config: ConfigDict, source: Source) -> Config:
  """Makes the network config of an experiment.

  Args:
    config: the experiment's config, of which the groups `model` and
      `attention` are used.
    source: the data source to model.

  Raises:
    ValueError: if the settings contradict each other or the data, or if a
      pattern lets a query see a later key.
  """
  settings = dict(config.attention)
  backend, tile = settings.pop("backend"), settings.pop("tile")
  name, mode = settings.pop("pattern"), settings.pop("mode")
  is_named = name in patterns_lib.FACTORIZATIONS
  if is_named:
    _check_lengths(settings, source.length)
  patterns = patterns_lib.assign(
    name,
    mode,
    num_layers=config.model.num_layers,
    num_heads=config.model.num_heads,
    **settings,
  )
  if not is_named:
    _check_causal(patterns, source.length)
  return Config(
    vocab_size=source.vocab_size,
    length=source.length,
    shape=tuple(source.shape),
    patterns=patterns,
    backend=backend,
    tile=tile,
    **config.model,
  )


def _check_lengths(settings: dict, length: int) -> None:
  for field in ("stride", "window"):
    if not 1 <= settings[field] <= length:
      raise ValueError(
        f"attention.{field}={settings[field]} must lie between 1 and the"
        f" {length} positions of a sequence"
      )


def _check_causal(
  layers: tuple[tuple[patterns_lib.Pattern, ...], ...], length: int
) -> None:
  """Raises a ValueError if a query sees a later key.

  Such a leak would make the likelihood of a sequence meaningless.
  """
  for pattern in set(itertools.chain(*layers)):
    if leak := patterns_lib.first_leak(pattern, length):
      raise ValueError(
        f"attention.pattern {pattern} lets query {leak[0]} see the later key"
        f" {leak[1]}, but each position is predicted from earlier ones only;"
        f" use ({pattern}) & Causal()"
      )
