"""Makes folders of text in which far keys matter, to train on.

python -m benchmarks.corpora copyright FOLDER
python -m benchmarks.corpora palestrina FOLDER --source=music21.whl

copyright: /usr/share/doc/*/copyright of a Debian system, or those below
--source, in the order of their packages. Of equal files, the first is taken;
files above half a megabyte are left out: Boost's alone has two.
palestrina: the masses in the package music21, a file that `pip download
--no-deps music21` fetches, in the order of their names, a document for each
part of a mass. Lines that begin with !!!, about the edition, are left out.

Writes FOLDER/train, validation and test. All parts of a mass are in one split;
else, each file is drawn by itself. --seed draws them. With --pieces=256, a
control, each split is instead one file of its pieces of 256 bytes, shuffled:
near matches stay, and of far ones only those between documents. Prints what
`benchmarks.matches` counts. What is written is others' work: use it, and do not
publish it.
"""

import pathlib
import re
import zipfile
from collections.abc import Mapping

import numpy as np
from absl import flags

from benchmarks import matches
from sparse_transformer import cli, data

SHARES = 0.8, 0.1, 0.1  # of the groups of files, for `data.SPLITS`
MOST = 500_000  # bytes of a copyright file
PARTS = re.compile(r".*/corpus/palestrina/(\w+)\.krn")
MASS = re.compile(rb"^!!!OPR:(.*)$", re.MULTILINE)
ABOUT = re.compile(rb"^!!!.*\n?", re.MULTILINE)
Documents = Mapping[str, tuple[bytes, bytes]]  # {name: (group, content)}


def copyright_files(source: str) -> Documents:
  """Distinct files by package, each its own group."""
  folder = pathlib.Path(source or "/usr/share/doc")
  found: dict[bytes, str] = {}
  for path in sorted(folder.glob("*/copyright")):
    if path.stat().st_size <= MOST:
      found.setdefault(path.read_bytes(), path.parent.name)
  return {name: (name.encode(), x) for x, name in found.items()}


def palestrina(source: str) -> Documents:
  """Parts of masses by name, grouped by mass."""
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
    raise ValueError(f"give one of {', '.join(CORPORA)}, and a folder to write")
  documents = CORPORA[argv[1]](args.source)
  if not documents:
    raise ValueError(f"{args.source or 'this system'} has no such documents")
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
  """{name: its split}; documents of a group have the same.

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
    contents: by name.
    split: by name.
    size: bytes of a piece; the last one of a split may be shorter.
    seed: of the order.

  Returns:
    (contents, split) of one document for each split, named as the split is.
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
  flags.DEFINE_string("source", "", "The folder, or package, that is read.")
  flags.DEFINE_integer("seed", 0, "Draws the splits.")
  flags.DEFINE_integer("pieces", 0, "Bytes of pieces to shuffle; 0: none.", 0)
  cli.run(main, takes_words=True)
