"""Arrangements: the orders in which a network reads the symbols of an example.

`Arrangement` itself is the order that examples have. Modules with others
register them here, and `data/__init__.py` imports these modules: to take one
out, delete its file and its import.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Arrangement:
  """Leaves examples as they are. Subclasses reorder them, as labels say.

  Arrangements are compared by value, because programs are cached by the config
  of a network, which has one.
  """

  def __len__(self) -> int:
    """The number of labels of an order, O; 0 if examples stay as they are."""
    return 0

  def draw(self, *seed: int) -> tuple[int, ...]:
    """Draws an order, each with the same probability.

    Args:
      *seed: integers; equal ones give equal orders.

    Returns:
      Its labels, O integers.
    """
    del seed
    return ()

  def labels(self, words: Sequence[str]) -> tuple[int, ...]:
    """Returns the O labels of the order that a user asks for.

    Args:
      words: those of the flag --order; without any, examples stay as they are.

    Raises:
      ValueError: there is no such order.
    """
    if words:
      raise ValueError(
        f"--order={words[0]} must be of data.orders: there are none"
      )
    return ()

  def arrange(self, example_L: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """Puts an example into an order.

    Args:
      example_L: integers, its symbols in their own order.
      labels: of the order, O integers.

    Returns:
      A row for the network, [L + O] of the same dtype: the symbols, then the
      labels.
    """
    del labels
    return example_L

  def restore(self, rows_BL: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """Puts rows back into the order of examples: inverts `arrange`.

    Args:
      rows_BL: numbers, one for each symbol of the order, without labels.
      labels: of the order, O integers.

    Returns:
      The numbers in the symbols' own order, [B, L].
    """
    del labels
    return rows_BL


# They are called as `of` is, with tuples; the last one reads `data.orders`.
ARRANGEMENTS: list[Callable[..., Arrangement]] = []


def of(orders: Sequence[str], shape: Sequence[int]) -> Arrangement:
  """Returns the arrangement of images that a config selects.

  Args:
    orders: `data.orders`; if empty, images stay as they are.
    shape: of images: (rows, columns, channels).

  Raises:
    ValueError: there is no such order of images of this shape.
  """
  if not orders:
    return Arrangement()
  if not ARRANGEMENTS:
    raise ValueError(f"data.orders={orders} must be empty: no order is known")
  return ARRANGEMENTS[-1](tuple(orders), tuple(shape))
