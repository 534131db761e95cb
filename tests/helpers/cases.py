"""Which cases of a test `make test` runs, and which only `make soak`."""

import pytest


def soak(*values):
  """A case of these values that `make soak` runs."""
  return pytest.param(*values, marks=pytest.mark.soak)


def listed(default, every):
  """The cases of a short list, and for `make soak` all others of `every`.

  A case is a tuple with a value for each parameter of the test.
  """
  return [*default, *(soak(*case) for case in every if case not in default)]
