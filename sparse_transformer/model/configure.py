"""How the config of an experiment becomes that of its network."""

import itertools
import re
from typing import Any

from sparse_transformer import patterns as patterns_lib, schema
from sparse_transformer.model import options
from sparse_transformer.model.hyperparameters import Config


def schedule(config: schema.Config) -> dict[int, str]:
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


def configure(config: schema.Config, source: Any) -> Config:
  """Makes the network config of an experiment, with the last of its patterns.

  A classifier has named patterns in their bidirectional form.

  Raises:
    ValueError: if the settings contradict each other or the data, or if a
      pattern is not well defined (see `Pattern.check`), has no pairs, or lets a
      query see a later key, except in a classifier.
  """
  settings = dict(config.attention)
  backend = settings.pop("backend")
  del settings["pattern"], settings["schedule"]
  name, mode = [*schedule(config).values()][-1], settings.pop("mode")
  length = source.length
  for field in ("stride", "window"):
    if settings[field] > length and name in patterns_lib.FACTORIZATIONS:
      raise ValueError(
        f"attention.{field}={settings[field]} must lie between 1 and the"
        f" {length} positions of a sequence"
      )
  patterns = patterns_lib.assign(
    name,
    mode,
    num_layers=config.model.num_layers,
    num_heads=config.model.num_heads,
    length=length,
    **settings,
  )
  is_named = name in (*patterns_lib.FACTORIZATIONS, *patterns_lib.PUBLISHED)
  if config.model.task == "classify" and is_named:
    convert = patterns_lib.bidirectional
    patterns = tuple(tuple(map(convert, heads)) for heads in patterns)
  network = Config(
    vocab_size=source.vocab_size,
    length=length,
    shape=tuple(source.shape),
    patterns=patterns,
    backend=backend,
    separator=source.separator,
    classes=len(source.classes),
    **config.model,
  )
  for pattern in dict.fromkeys(itertools.chain(*patterns)):
    pattern.check(length)
    _check_use(pattern, length, not network.classifies)
  for option in options.of(network):
    option.check()
  return network


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
