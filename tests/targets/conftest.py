"""Settings for the tests of compilers for other devices."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _own_flags():
  """They run another version of JAX, and optimize as users do."""
  with pytest.MonkeyPatch.context() as patch:
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
      patch.delenv(name, raising=False)
    yield
