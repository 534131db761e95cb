"""The names of data sources, to which a config file can add."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from sparse_transformer.data.sources import Sequences, Source

if TYPE_CHECKING:
  from ml_collections import ConfigDict
else:
  ConfigDict = Any  # so that the command can say that it is missing

Factory = TypeVar("Factory", bound=Callable[..., Source])

SOURCES: dict[str, Callable[..., Source]] = {}
WITHOUT_PATH: set[str] = set()  # these read no `data.path`
BUILDERS: dict[str, str] = {}  # "module:class": it imports tensorflow-datasets
PREPARE = "python -m sparse_transformer.data prepare"


def register(
  name: str, builder: str | None = None, reads_path: bool = True
) -> Callable[[Factory], Factory]:
  """Decorates a function that maps the `data` group of a config to a source.

  Args:
    name: the `data.name` that selects the source.
    builder: "module:class", in a package, of the tensorflow-datasets builder
      that `python -m sparse_transformer.data prepare NAME` runs, if any.
    reads_path: whether it reads `data.path`; if not, one is an error.

  Raises:
    ValueError: the name is already registered.
  """
  if name in SOURCES:
    raise ValueError(f"source {name!r} is already registered")

  def add(factory: Factory) -> Factory:
    SOURCES[name] = factory
    if builder:
      BUILDERS[name] = builder
    if not reads_path:
      WITHOUT_PATH.add(name)
    return factory

  return add


def source(config: ConfigDict, labels: bool = True) -> Source:
  """Makes the source that the `data` group of a config selects.

  Args:
    config: the group `data`.
    labels: whether labels are used, if there are any.

  Raises:
    ValueError: its name is unknown or one of its fields is invalid.
  """
  if config.name not in SOURCES:
    raise ValueError(
      f"unknown data.name={config.name!r}; known: {', '.join(SOURCES)}; for a"
      " run whose config file registers it, add --config=FILE"
    )
  if config.path and config.name in WITHOUT_PATH:
    raise ValueError(
      f"data.path={config.path} is not read with data.name={config.name}; leave"
      " it empty, or set data.name to bytes"
    )
  found = SOURCES[config.name](config)
  if config.documents and found.separator is None:
    raise ValueError(
      f"data.documents=True, but data.name={config.name} has no documents; set"
      " it to bytes, jsonl or fasta, or leave documents False"
    )
  if not labels and isinstance(found, Sequences):
    return dataclasses.replace(found, classes=())
  return found
