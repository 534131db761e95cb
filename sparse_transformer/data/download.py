"""Downloads data sets and prepares them with tensorflow-datasets."""

import http.client
import pkgutil
import sys
import threading
import urllib.request
from typing import Any

from sparse_transformer import atomic
from sparse_transformer.data import array_records, files, sources

PATIENCE = 8  # seconds to wait for the host of a download to answer


def prepare(name: str, data_dir: str = "") -> Any:
  """Downloads the data set of a source; returns the builder it registered.

  Writes into `data_dir`, the folder of all data sets, or the default for "".

  Raises:
    ValueError: the builder is unknown, or the archive is damaged.
    ConnectionError: the archive cannot be downloaded.
    NotADirectoryError: `data_dir` is a file.
  """
  if name not in sources.BUILDERS:
    raise ValueError(
      f"cannot prepare {name!r}; known: {', '.join(sources.BUILDERS)}"
    )
  import tensorflow_datasets as tfds

  if not sys.stderr.isatty():
    tfds.disable_progress_bar()
  root = array_records.root(data_dir)
  if root.exists() and not root.is_dir():
    raise NotADirectoryError(f"--data_dir={root} is a file; name a folder")
  downloads = root / "downloads"
  make = pkgutil.resolve_name(sources.BUILDERS[name])
  with files.blame(root / make.name):  # which an earlier one may have left
    builder = make(data_dir=root, file_format="array_record")
  if not builder.data_path.exists():
    _check_archives(builder, downloads)
  download = tfds.core.download
  try:
    builder.download_and_prepare()
  except download.download_manager.NonMatchingChecksumError as error:
    raise files.damaged(f"the archive in {downloads}", error) from error
  except download.DownloadError as error:
    raise ConnectionError(str(error)) from error
  return builder


def _check_archives(builder, downloads):
  """Checks what tensorflow-datasets would notice after minutes, or never."""
  from tensorflow_datasets.core.download import resource

  for url, info in builder.url_infos.items():
    cached = resource.get_dl_fname(url, info.checksum) + ".INFO"
    manual = downloads / "manual" / info.filename
    places = (manual, downloads / cached, downloads / builder.name / cached)
    if manual.exists() and atomic.size(manual) != info.size:
      found = f"it has {atomic.size(manual):,} bytes, not {info.size:,}"
      raise files.damaged(manual, ValueError(found))
    if any(place.exists() for place in places):
      continue
    if problem := _probe(url):
      raise ConnectionError(
        f"cannot download {url} ({problem}); put the file at {manual} and run"
        " this command again"
      )


def _probe(url: str) -> Exception | str | None:
  """Returns what prevents a download, or None."""
  found: list[Exception | str | None] = [f"no answer in {PATIENCE} seconds"]

  def open_url():
    try:
      urllib.request.urlopen(url, timeout=PATIENCE).close()
      found.append(None)
    except (OSError, http.client.HTTPException) as error:
      found.append(error)

  # In a thread, because resolving a host name cannot time out.
  thread = threading.Thread(target=open_url, daemon=True)
  thread.start()
  thread.join(PATIENCE)
  return found[-1]
