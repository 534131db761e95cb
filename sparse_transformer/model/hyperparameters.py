"""The typed config of a network."""

import dataclasses

from sparse_transformer import patterns as patterns_lib, schema


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(schema.Model):
  """Everything that defines a network: its settings, patterns and data.

  Raises:
    ValueError: the heads do not divide the widths, or the task does not fit the
      data.
  """

  vocab_size: int  # number of symbols, V
  length: int  # symbols in a sequence, n
  # Sizes of the position embeddings: rows, columns and possibly channels.
  shape: tuple[int, ...]
  # What attends to what: a tuple (layers) of tuples (heads).
  patterns: tuple[tuple[patterns_lib.Pattern, ...], ...]
  backend: str = "auto"
  tile: int = 0
  # The symbol that ends a document, none of whose positions attend to another
  # document's; None if sequences are not made of documents.
  separator: int | None = None
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

  @property
  def classifies(self) -> bool:
    """Whether the network predicts a label of the sequence."""
    return self.task == "classify"

  @property
  def outputs(self) -> int:
    """Width of the output layer: symbols, or classes."""
    return self.classes if self.classifies else self.vocab_size

  @property
  def row_length(self) -> int:
    """Integers of an example, see `Sequences.examples`."""
    return self.length + 2 * self.classifies

  @property
  def qk_width(self) -> int:
    """Width of the queries and keys of all heads together."""
    return self.width // 2 if self.half_size else self.width

  @property
  def head_width(self) -> int:
    """Width of a head's queries and keys, K."""
    return self.qk_width // self.num_heads

  @property
  def num_key_heads(self) -> int:
    """Heads of keys and values, G."""
    return self.key_heads or self.num_heads

  @property
  def mlp_width(self) -> int:
    """Inner width of the MLP, F."""
    return self.width * (2 if self.half_size else 4)

  @property
  def axes(self) -> tuple[int, ...]:
    """Sizes of the tables of position embeddings; () without them."""
    axes = tuple(size for size in self.shape if size > 1) or (1,)
    return axes if self.positions == "learned" else ()
