"""Results in a file, written one by one, so that a benchmark can be resumed."""

import json
import pathlib
from collections.abc import Callable, Iterable

from sparse_transformer import atomic

Record = dict


def record(
  path: pathlib.Path,
  names: tuple[str, ...],
  keys: Iterable[tuple],
  measure: Callable[..., Record],
  again: bool = False,
) -> list[Record]:
  """Measures what a file does not have yet.

  Args:
    path: a JSON file, which is written after each measurement.
    names: the fields that tell records apart.
    keys: their values in the records that are wanted.
    measure: function of these values to the other fields of a record.
    again: whether to measure what the file has already, too.

  Returns:
    All records of the file, sorted by key.
  """
  text = path.read_text() if path.exists() else "[]"
  records = {tuple(r[name] for name in names): r for r in json.loads(text)}
  for key in keys:
    if again or key not in records:
      found = dict(zip(names, key, strict=True)) | measure(*key)
      records = dict(sorted((records | {key: found}).items()))
      content = json.dumps([*records.values()], indent=1)
      atomic.write_text(path, content + "\n")
  return [*records.values()]
