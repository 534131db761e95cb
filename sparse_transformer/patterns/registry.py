"""The registry of patterns that expressions, tests and tables draw on."""

import inspect
from collections.abc import Mapping
from typing import TypeVar

from sparse_transformer.patterns.base import Examples, Pattern

CATALOGUE: dict[str, type[Pattern]] = {}
# Those whose pairs follow the content, which only expressions have in common
# with the others.
CONTENT: dict[str, type[Pattern]] = {}

_Class = TypeVar("_Class", bound=type[Pattern])


def register(cls: _Class) -> _Class:
  """Adds a class of patterns to `CATALOGUE`, or to `CONTENT`; a decorator.

  Its name can then be used in expressions (`parse`), and everything derived
  from the catalogue includes it: tests, benchmarks and the README's table.
  The class needs a docstring and `examples`. Defining the same class again, as
  one does in a notebook, replaces it.

  Raises:
    ValueError: another class has that name.
  """
  is_static = cls.contents is Pattern.contents
  catalogue = CATALOGUE if is_static else CONTENT
  known = (CATALOGUE | CONTENT).get(cls.__name__, cls)
  if (known.__module__, known.__qualname__) != (
    cls.__module__,
    cls.__qualname__,
  ):
    raise ValueError(
      f"a pattern {cls.__name__} already exists in {known.__module__}; "
      "choose another name"
    )
  catalogue[cls.__name__] = cls
  return cls


def examples() -> dict[str, Examples]:
  """The examples of all registered classes, by name."""
  return {name: cls.examples() for name, cls in CATALOGUE.items()}


def table(
  catalogue: Mapping[str, type[Pattern]] = CATALOGUE,
) -> list[tuple[str, str]]:
  """(signature, first line of the docstring) of all registered classes.

  >>> print(*table()[2], sep=": ")
  Local(window, causal=True): The last `window` keys, the query itself included.
  """
  return [(signature(cls), _summary(cls)) for cls in catalogue.values()]


def signature(cls: type[Pattern]) -> str:
  """The expression of a class of patterns: its name and arguments."""
  parameters = inspect.signature(cls).parameters.values()
  plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
  return f"{cls.__name__}{inspect.Signature(plain)}"


def _summary(cls: type[Pattern]) -> str:
  return (inspect.getdoc(cls) or "").partition("\n")[0]
