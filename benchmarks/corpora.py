"""Writes folders of text in which distant keys matter, for training.

python -m benchmarks.corpora copyright FOLDER
python -m benchmarks.corpora palestrina FOLDER --source=music21.whl

copyright: the files /usr/share/doc/*/copyright of a Debian system, or those in
the folder --source, sorted by package. Of identical files, only the first is
used. Files larger than half a megabyte are omitted, because that of Boost alone
has two megabytes.
palestrina: the masses in the package music21, sorted by name, with a document
for each part of a mass. The package is the file that `pip download --no-deps
music21` fetches. Lines that begin with !!!, which are about the edition, are
omitted.

The files are written to FOLDER/train, FOLDER/validation and FOLDER/test. --seed
draws the splits. All parts of a mass are in the same split; other files are
drawn separately. As a control, --pieces=256 cuts each split into pieces of 256
bytes, shuffles them, and writes them as one file. This keeps near matches, but
of distant matches only those between documents. The command prints the counts
of `benchmarks.matches`. The texts are the work of others, so do not publish
them.
"""

import pathlib
import re
import zipfile
from collections.abc import Mapping

import numpy as np
from absl import flags

from benchmarks import matches
from sparse_transformer import cli, data

SHARES = 0.8, 0.1, 0.1  # fractions of groups of files, for `data.SPLITS`
MOST = 500_000  # maximum size of a copyright file in bytes
PARTS = re.compile(r".*/corpus/palestrina/(\w+)\.krn")
MASS = re.compile(rb"^!!!OPR:(.*)$", re.MULTILINE)
ABOUT = re.compile(rb"^!!!.*\n?", re.MULTILINE)
Documents = Mapping[str, tuple[bytes, bytes]]  # {name: (group, content)}


def copyright_files(source: str) -> Documents:
  """Returns distinct copyright files by package, each in its own group."""
  folder = pathlib.Path(source or "/usr/share/doc")
  found: dict[bytes, str] = {}
  for path in sorted(folder.glob("*/copyright")):
    if path.stat().st_size <= MOST:
      found.setdefault(path.read_bytes(), path.parent.name)
  return {name: (name.encode(), x) for x, name in found.items()}


def palestrina(source: str) -> Documents:
  """Returns parts of masses by name, grouped by mass."""
  if not source:
    raise ValueError("set --source to the file of the package music21")
  found = {}
  with zipfile.ZipFile(source) as package:
    for name in sorted(package.namelist()):
      if part := PARTS.fullmatch(name):
        content = package.read(name)
        mass = MASS.search(content)
        if mass is None:
          raise ValueError(f"{name} in {source} does not name its mass")
        found[part[1]] = mass[1].strip(), ABOUT.sub(b"", content)
  return found


CORPORA = dict(copyright=copyright_files, palestrina=palestrina)


def main(argv):
  args = flags.FLAGS
  if len(argv) != 3 or argv[1] not in CORPORA:
    raise ValueError(
      f"give one of {', '.join(CORPORA)}, and the folder to write; see --help"
    )
  documents = CORPORA[argv[1]](args.source)
  if not documents:
    raise ValueError(
      f"{args.source or 'this system'} has no such documents; set --source"
    )
  contents = {name: content for name, (_, content) in documents.items()}
  split = split_of(documents, args.seed)
  if args.pieces:
    contents, split = shuffle(contents, split, args.pieces, args.seed)
  folder = pathlib.Path(argv[2])
  for name, content in contents.items():
    path = folder / split[name] / f"{name}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)

  found = matches.describe(b"".join(contents.values()))
  print(f"{len(documents):,} files, {found['bytes']:,} bytes in {folder}")
  for kib, bits in found["lzma"].items():
    print(f"LZMA, {kib} KiB: {bits:.3f} bits/byte")
  least, most = matches.FAR
  print(
    f"nearest match {least} to {most} back: {found['far']:.1%} of the bytes,"
    f" and in {found['right']:.1%} of these cases, the byte that followed it"
    " is the next byte"
  )


def split_of(documents: Documents, seed: int) -> dict[str, str]:
  """Returns {name: its split}; documents of a group are in the same split.

  >>> groups = {str(i): (b"%d" % (i // 2), b"") for i in range(80)}
  >>> split = split_of(groups, seed=0)
  >>> split["0"] == split["1"], sum(x == "train" for x in split.values())
  (True, 64)
  """
  groups = sorted({group for group, _ in documents.values()})
  order = np.random.RandomState(seed).permutation(len(groups))
  ends = np.rint(np.cumsum(SHARES) * len(groups))
  numbers = np.searchsorted(ends, order, side="right")
  split = {x: data.SPLITS[i] for x, i in zip(groups, numbers, strict=True)}
  return {name: split[group] for name, (group, _) in documents.items()}


def shuffle(
  contents: Mapping[str, bytes], split: Mapping[str, str], size: int, seed: int
) -> tuple[dict[str, bytes], dict[str, str]]:
  """Cuts the text of each split into pieces, and shuffles them.

  Args:
    contents: {name: text}.
    split: {name: its split}.
    size: the bytes of a piece; the last piece of a split may be shorter.
    seed: the seed of the shuffle.

  Returns:
    (contents, split), with one document per split, named after the split.
  """
  random = np.random.RandomState(seed)
  shuffled = {}
  for part in data.SPLITS:
    text = b"".join(x for name, x in contents.items() if split[name] == part)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    random.shuffle(pieces)
    shuffled[part] = b"".join(pieces)
  return shuffled, {part: part for part in data.SPLITS}


if __name__ == "__main__":
  flags.DEFINE_string("source", "", "The folder or package to read.")
  flags.DEFINE_integer("seed", 0, "Seed of the splits and of --pieces.")
  flags.DEFINE_integer(
    "pieces", 0, "Size in bytes of the pieces to shuffle; 0: no shuffle.", 0
  )
  cli.run(main, takes_words=True)
