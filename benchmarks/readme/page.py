"""The text of a page: its parts made from records, and all other numbers."""

import re
from collections.abc import Iterable, Mapping

from benchmarks import record
from benchmarks.readme import evidence, sentences, tables

BEGIN, END = "<!-- made by make results: {} -->", "<!-- end -->"
PART = re.compile(
  BEGIN.format(r"(\w+)") + r"\n\n(.*?)" + re.escape(END), re.DOTALL
)
# Not text: code, in lines or in blocks, and the targets of links.
CODE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
# A number, but not one in a name: CIFAR-10, H100, float32.
NUMBER = re.compile(r"(?<![\w.,])(?<![A-Za-z]-)\d(?:[\d.,]*\d)?(?:e-?\d+)?")


def made(name: str, text: str) -> tuple[str, list[str]]:
  """A page with its parts made again, and what is wrong with `text`.

  Args:
    name: path of the page in the repository.
    text: the page as it is.

  Raises:
    FileNotFoundError: a record is missing.
    ValueError: the page lacks a part, or has an unknown one.
  """
  check_records(name, text)
  if name == "docs/evidence.md":
    new = evidence.page()
    return new, [f"{name} differs from the records"] * (new != text)
  makers = tables.PARTS[name]
  if differing := parts(text).keys() ^ makers.keys():
    raise ValueError(
      f"{name} and benchmarks/readme/tables.py have different parts:"
      f" {', '.join(sorted(differing))}"
    )
  content = {part: make() for part, make in makers.items()}
  found = [
    f"{name}: the part {part!r} differs from the records"
    for part, old in parts(text).items()
    if old != content[part]
  ]
  text = replace(text, content)
  if name == "README.md":
    found += problems(text, sentences.of_records(), sentences.FIXED)
  return text, found


def parts(text: str) -> dict[str, str]:
  """The contents of the parts between markers, by name."""
  return dict(PART.findall(text))


def replace(text: str, content: Mapping[str, str]) -> str:
  """The text with other contents of its parts."""
  return PART.sub(
    lambda part: f"{BEGIN.format(part[1])}\n\n{content[part[1]]}{END}", text
  )


def check_records(page: str, text: str) -> None:
  """Checks that the records that a page names exist.

  Raises:
    FileNotFoundError: one does not.
  """
  for name in re.findall(r"benchmarks/results/([\w.-]+\.json)", text):
    if not (record.FOLDER / name).exists():
      raise FileNotFoundError(
        f"{page} names benchmarks/results/{name}, which is missing; get it"
        " back, or take out what is made from it"
      )


def problems(
  text: str, needed: Iterable[str], allowed: Iterable[str] = ()
) -> list[str]:
  """What is wrong with the text outside of the parts.

  Args:
    text: the README.
    needed: pieces of text whose numbers are right. Each must occur; spaces and
      line breaks are the same.
    allowed: the same, of pieces that need not occur.
  """
  needed, words = list(needed), " ".join(text.split())
  found = [
    f"README.md lacks what the records say: {sentence}"
    for sentence in needed
    if sentence not in words
  ]
  for sentence in [*needed, *allowed]:
    pattern = r"\s+".join(map(re.escape, sentence.split()))
    # Line breaks stay, so that a number has a line.
    text = re.sub(pattern, _blank, text)
  text = CODE.sub(_blank, PART.sub(_blank, text))
  for number in NUMBER.finditer(text):
    line = text[: number.start()].count("\n") + 1
    found.append(
      f"README.md:{line}: no record has the number {number[0]}; make it one of"
      " benchmarks/readme/sentences.py"
    )
  return found


def _blank(match):
  return re.sub(r"[^\n]", " ", match[0])
