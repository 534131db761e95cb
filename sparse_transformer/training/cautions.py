"""Warnings about settings that are valid but probably unintended."""

import itertools
import sys

from ml_collections import ConfigDict

from sparse_transformer import model as model_lib, patterns
from sparse_transformer.training.explanation import network_report


def report(config: ConfigDict, model: model_lib.Config) -> None:
  """Prints a line on standard error for each such setting."""
  of_task = _causal(model) if model.classifies else _skipped_byte(model)
  for caution in _shared_summaries(config), of_task:
    if caution:
      print(f"warning: {caution}", file=sys.stderr)


def _shared_summaries(config: ConfigDict) -> str:
  """The caution if heads share a summary by default.

  Section 4.3 of Child et al. 2019 has distinct summary columns for the heads of
  fixed attention. More than one, but fewer than heads, are taken to be
  intended: the released code has 8 heads share 4.
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
    return (
      f"with attention.num_summaries=1, {heads} heads of {attention.pattern}"
      " share the same summary columns; the paper's have distinct ones, as with"
      f" attention.num_summaries={min(heads, room)}"
    )
  return ""


def _causal(model: model_lib.Config) -> str:
  """The caution if a classifier has causal patterns."""
  for pattern in dict.fromkeys(itertools.chain(*model.patterns)):
    # Content-based patterns have no other form.
    if not pattern.contents() and patterns.analysis.is_causal(
      pattern, model.length
    ):
      return (
        f"attention.pattern {patterns.shorten(pattern)} hides later keys from"
        " queries, which model.task=classify allows with causal=False"
      )
  return ""


def _skipped_byte(model: model_lib.Config) -> str:
  """The caution if keys one row back hold no byte above the target."""
  held = network_report.find_held(model)
  row = held.row
  if row is None or any(group.above is not False for group in held.groups):
    return ""
  runs = [run for group in held.groups for run in group.runs]
  if not any(first <= row + 1 <= last for first, last in runs):
    return ""
  return (
    f"no layer's keys hold the byte above the target, t-{row}: inputs are"
    f" shifted by one, so that the key {row} back holds t-{row + 1};"
    f" Strided({row}, offset=1) has it, as in attention.pattern=strided_target"
  )
