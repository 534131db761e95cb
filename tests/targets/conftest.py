"""Settings for the tests of compilers for other devices."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _own_flags():
  """They run another version of JAX, which may not know our XLA_FLAGS."""
  with pytest.MonkeyPatch.context() as patch:
    patch.delenv("XLA_FLAGS", raising=False)
    yield
