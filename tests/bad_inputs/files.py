"""What a bad input's `prepare` may be: files and folders, good and bad."""

import json
import os
import pathlib
import shutil
import socket
from collections.abc import Callable

import runs

Prepare = Callable[[pathlib.Path], object]


def several(*steps: Prepare) -> Prepare:
  def prepare(run):
    for step in steps:
      step(run)

  return prepare


def copy(run: pathlib.Path) -> None:
  shutil.copytree(run, "run")


def file(name: str, content: str | bytes = b"") -> Prepare:
  data = content.encode("latin1") if isinstance(content, str) else content

  def prepare(run):
    path = pathlib.Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)

  return prepare


def folder(name: str) -> Prepare:
  return lambda run: pathlib.Path(name).mkdir(parents=True)


def link(name: str, target: str) -> Prepare:
  return lambda run: pathlib.Path(name).symlink_to(target)


def fifo(name: str) -> Prepare:
  return lambda run: os.mkfifo(name)


def bind(name: str) -> Prepare:
  """A socket."""

  def prepare(run):
    with socket.socket(socket.AF_UNIX) as server:
      server.bind(name)

  return prepare


def sparse(name: str, size: int) -> Prepare:
  """A file of zeros, which takes no space."""

  def prepare(run):
    pathlib.Path(name).touch()
    os.truncate(name, size)

  return prepare


def deleted(name: str) -> Prepare:
  """A copy of the run without a file or folder."""

  def prepare(run):
    copy(run)
    path = pathlib.Path("run") / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()

  return prepare


def replaced(name: str, content: str | bytes) -> Prepare:
  """A copy of the run in which a file has other contents."""
  return several(copy, file(f"run/{name}", content))


def made(name: str, step: Callable[[str], Prepare]) -> Prepare:
  """A copy of the run in which a path is something else: folder, fifo."""
  return several(deleted(name), step(f"run/{name}"))


def setting(field: str, value: object) -> Prepare:
  """A copy of the run whose config.json has another value."""
  group, name = field.split(".")

  def prepare(run):
    copy(run)
    path = pathlib.Path("run/config.json")
    settings = json.loads(path.read_text())
    settings[group][name] = value
    path.write_text(json.dumps(settings))

  return prepare


def text_run(run: pathlib.Path) -> None:
  """The config of a run on 500 bytes in windows of 32, and no checkpoint."""
  file("text", b"some text " * 50)(run)
  config = runs.text(pathlib.Path("text"))
  file("run/config.json", json.dumps(config.to_dict()))(run)


def cut(name: str) -> Prepare:
  """A copy of the run in which a file has lost its second half."""

  def prepare(run):
    copy(run)
    (path,) = pathlib.Path("run").glob(name)
    os.truncate(path, path.stat().st_size // 2)

  return prepare


some_text = file("text", b"some text " * 100)
