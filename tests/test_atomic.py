"""Files that are written whole, whatever is in their place."""

import os

import pytest
from helpers.errors import refused

from sparse_transformer import atomic


def victim(path):
  (path.parent / "victim").write_text("mine")
  path.symlink_to(path.parent / "victim")


IN_PLACE = {
  "pipe": os.mkfifo,
  "link": victim,
  "dangling": lambda path: path.symlink_to(path.parent / "nowhere"),
  "file": lambda path: path.write_text("old"),
}


@pytest.mark.parametrize("kind", IN_PLACE)
def test_file_is_written_through_no_link_and_no_pipe(kind, tmp_path):
  """And only a regular file is appended to."""
  path = tmp_path / "name"
  IN_PLACE[kind](path)
  if kind == "file":
    with atomic.appending(path) as file:
      file.write("er")
    assert path.read_text() == "older"
  else:
    with refused("/name is not a regular file"):
      atomic.appending(path)

  atomic.write_text(path, "é")

  assert path.read_bytes() == "é".encode()
  assert not path.is_symlink()
  assert not (tmp_path / "nowhere").exists()

  if kind == "link":
    assert (tmp_path / "victim").read_text() == "mine"

  assert {x.name for x in tmp_path.iterdir()} <= {"name", "victim"}


def test_failure_keeps_the_file_and_names_it(tmp_path):
  path = tmp_path / "name"
  path.write_text("old")

  with pytest.raises(OSError, match=r"\[Errno 5\] cannot .*/name'$"):
    with atomic.writing(path) as new:
      new.write_text("half of")
      raise OSError("cannot encode")  # as libraries do, without a number
  with pytest.raises(KeyboardInterrupt), atomic.writing(path):
    raise KeyboardInterrupt
  assert path.read_text() == "old"
  assert [*tmp_path.iterdir()] == [path]
  for place in (tmp_path, path / "below"):
    with pytest.raises(OSError) as error:
      atomic.write_text(place, "")
    assert str(error.value).endswith(f"{str(place)!r}")
