"""Warnings about settings that are valid but probably unintended."""

import sys

from ml_collections import ConfigDict


def report(config: ConfigDict) -> None:
  """Prints a line on standard error if heads share a summary by default.

  Fixed attention has distinct summary columns for its heads in section 4.3 of
  Child et al. 2019. A config of another pattern does not set their number, 1 by
  default, which `--config.attention.pattern=fixed` then gives to all heads.
  More than one, but fewer than heads, are taken to be intended: the released
  code has 8 heads share 4.
  """
  attention, heads = config.attention, config.model.num_heads
  if attention.pattern == "fixed" and attention.mode == "heads":
    heads //= 2  # the others have the blocks
  room = attention.stride // attention.width
  if (
    attention.pattern.startswith("fixed")
    and attention.num_summaries == 1
    and min(heads, room) > 1
  ):
    print(
      f"warning: with attention.num_summaries=1, {heads} heads of"
      f" {attention.pattern} share the same summary columns; the paper's have"
      f" distinct ones, as with attention.num_summaries={min(heads, room)}",
      file=sys.stderr,
    )
