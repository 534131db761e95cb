"""Downloads data sets and prepares them with tensorflow-datasets."""

import http.client
import pathlib
import pkgutil
import shutil
import sys
import urllib.request
from typing import Any

from sparse_transformer import atomic
from sparse_transformer.data import array_records, files, registered

PATIENCE = 8  # seconds to wait for the host of a download to answer


def prepare(name: str, data_dir: str = "") -> Any:
  """Downloads the data set of a source; returns the builder it registered.

  Writes into `data_dir`, the folder of all data sets, or the default for "".

  Raises:
    ValueError: the builder is unknown, or the archive is damaged.
    ConnectionError: the archive cannot be downloaded.
    NotADirectoryError: `data_dir` is a file.
  """
  if name not in registered.BUILDERS:
    raise ValueError(
      f"cannot prepare {name!r}; known: {', '.join(registered.BUILDERS)}"
    )
  import tensorflow_datasets as tfds

  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  root = array_records.root(data_dir)
  if root.exists() and not root.is_dir():
    raise NotADirectoryError(f"--data_dir={root} is a file; name a folder")
  make = pkgutil.resolve_name(registered.BUILDERS[name])
  with files.blame(root / make.name):  # which an earlier one may have left
    builder = make(data_dir=root, file_format="array_record")
  if builder.data_path.exists():
    return builder
  ((url, info),) = builder.url_infos.items()
  archive = root / "downloads" / "manual" / info.filename
  if not archive.exists():
    _download(url, info.size, archive)
  try:
    builder.download_and_prepare()
  except tfds.core.download.download_manager.NonMatchingChecksumError as error:
    raise files.damaged(archive, error) from error
  return builder


def _download(url: str, size: int, path: pathlib.Path) -> None:
  """Puts a file of some bytes where tensorflow-datasets looks for it."""
  print(f"downloads {size:,} bytes from {url}", file=sys.stderr)
  try:
    with urllib.request.urlopen(url, timeout=PATIENCE) as answer:
      path.parent.mkdir(parents=True, exist_ok=True)
      with atomic.writing(path) as new, new.open("wb") as file:
        shutil.copyfileobj(answer, file)
        if (found := file.tell()) != size:
          raise EOFError(f"the answer has {found:,} bytes")
  except (OSError, EOFError, http.client.HTTPException) as error:
    raise ConnectionError(
      f"cannot download {url} ({error}); put the file at {path} and run this"
      " command again"
    ) from error
