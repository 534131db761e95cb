"""How users are told what is wrong: in one line."""

import contextlib
import re

import pytest


@contextlib.contextmanager
def refused(*phrases):
  """Checks that a ValueError of one line is raised, which has all phrases.

  The phrases are regular expressions.
  """
  with pytest.raises(ValueError) as caught:
    yield caught
  message = str(caught.value)
  assert "\n" not in message
  for phrase in phrases:
    assert re.search(phrase, message), message
