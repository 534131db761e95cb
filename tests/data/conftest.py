"""What each test of data starts with."""

import pytest

from sparse_transformer.data import files


@pytest.fixture(autouse=True)
def nothing_told():
  """As if the process had warned of nothing yet."""
  files.WARNED.clear()
