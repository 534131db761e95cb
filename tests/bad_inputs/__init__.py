"""Inputs that commands must reject: the data of test_bad_inputs.py."""

from bad_inputs.comparisons import comparisons
from bad_inputs.config_files import OTHER_TYPES, config_files, other_types
from bad_inputs.expressions import patterns
from bad_inputs.fields import of_some, overrides
from bad_inputs.flags import flags
from bad_inputs.folders import folders
from bad_inputs.sources import data, preparing

__all__ = "GROUPS", "OTHER_TYPES"

GROUPS = {
  group.__name__: tuple(group())
  for group in (
    overrides,
    of_some,
    other_types,
    config_files,
    patterns,
    flags,
    comparisons,
    data,
    preparing,
    folders,
  )
}
