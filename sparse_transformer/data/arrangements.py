"""Arrangements: the orders in which a network reads the symbols of an example.

The class `Arrangement` itself leaves examples in their own order. Modules that
define other arrangements register them here, and `data/__init__.py` imports
these modules. To remove an arrangement, delete its file and its import.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Arrangement:
  """Leaves examples in their own order. Subclasses define other orders.

  Each order is identified by O integers, its labels. Arrangements are compared
  by value, because they are part of a network's config, and compiled programs
  are cached by this config.
  """

  def __len__(self) -> int:
    """Returns O, the number of labels per order; 0 if only one order exists."""
    return 0

  def draw(self, *seed: int) -> tuple[int, ...]:
    """Draws an order uniformly at random.

    Args:
      *seed: integers; the same integers give the same order.

    Returns:
      The O integer labels that identify the order.
    """
    del seed
    return ()

  def labels(self, words: Sequence[str]) -> tuple[int, ...]:
    """Returns the O labels of the order that a user requests.

    Args:
      words: the values of the flag --order. If empty, examples stay in their
        own order.

    Raises:
      ValueError: there is no such order.
    """
    if words:
      raise ValueError(
        f"--order={words[0]} must be one of data.orders, but this run has none;"
        " omit --order"
      )
    return ()

  def arrange(self, example_L: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """Puts an example into an order.

    Args:
      example_L: symbols in their own order, integers.
      labels: the labels of the order, O integers.

    Returns:
      A row for the network, [L + O] of the same dtype: the symbols in the new
      order, followed by the labels.
    """
    del labels
    return example_L

  def restore(self, rows_BL: np.ndarray, labels: Sequence[int]) -> np.ndarray:
    """Puts rows back into their own order, the inverse of `arrange`.

    Args:
      rows_BL: one number per symbol, such as the symbol itself or its loss, in
        the order that `labels` identifies. The rows do not include the labels.
      labels: the labels of the order, O integers.

    Returns:
      The numbers in the original order of the example, [B, L].
    """
    del labels
    return rows_BL


# Functions with the arguments of `of`, as tuples. The last one registered
# interprets `data.orders`.
ARRANGEMENTS: list[Callable[..., Arrangement]] = []


def of(orders: Sequence[str], shape: Sequence[int]) -> Arrangement:
  """Returns the arrangement of images that a config selects.

  Args:
    orders: `data.orders`; if empty, images stay in their own order.
    shape: the shape of images, (rows, columns, channels).

  Raises:
    ValueError: there is no such order for images of this shape.
  """
  if not orders:
    return Arrangement()
  if not ARRANGEMENTS:
    raise ValueError(
      f"data.orders={orders} must be empty, because no order is registered"
    )
  return ARRANGEMENTS[-1](tuple(orders), tuple(shape))
