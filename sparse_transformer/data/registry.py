"""The sources by name: adding one takes a single registration.

  @data.register("letters")
  def letters(config):
    return data.Stream(config.length, config.columns, load=read_the_letters)

`config.data.name = "letters"` then selects it. A source whose data set must be
downloaded also names a tensorflow-datasets builder,

  @data.register("letters", builder="my_package.letters:Letters")

and `python -m sparse_transformer.data prepare letters` runs it.
"""

from collections.abc import Callable
from typing import TypeVar

from ml_collections import ConfigDict

from sparse_transformer.data import sources

Factory = TypeVar("Factory", bound=Callable[..., sources.Source])

SOURCES: dict[str, Callable[..., sources.Source]] = {}
# "module:class" by the name of the source. Strings, because a builder imports
# tensorflow-datasets.
BUILDERS: dict[str, str] = {}
PREPARE = "python -m sparse_transformer.data prepare"


def register(
  name: str, builder: str | None = None
) -> Callable[[Factory], Factory]:
  """Decorates a function that maps the `data` group of a config to a source.

  Args:
    name: the `data.name` that selects the source.
    builder: "module:class" of the tensorflow-datasets builder that downloads
      its data set, if any. The module must be in a package.

  Raises:
    ValueError: if the name is already registered.
  """
  if name in SOURCES:
    raise ValueError(f"source {name!r} is already registered")

  def add(factory: Factory) -> Factory:
    SOURCES[name] = factory
    if builder:
      BUILDERS[name] = builder
    return factory

  return add


def source(config: ConfigDict) -> sources.Source:
  """Makes the source that the `data` group of a config selects.

  Raises:
    ValueError: if its name is unknown or one of its fields is invalid.
  """
  if config.name not in SOURCES:
    raise ValueError(
      f"unknown data.name={config.name!r}; known: {', '.join(SOURCES)}"
    )
  return SOURCES[config.name](config)
