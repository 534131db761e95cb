"""Paragraphs of the pages, and how a record was made."""

import textwrap
from typing import Any


def wrap(text: str) -> str:
  """A point of a list, in lines of at most 100 characters."""
  return textwrap.fill(
    text,
    100,
    subsequent_indent="  " if text.startswith("- ") else "",
    break_long_words=False,
    break_on_hyphens=False,
  )


def origin(name: str, about: dict[str, Any], seeds: int = 0) -> str:
  """How a record was made: command, seeds if any, machine and commit."""
  of_seeds = f"{seeds} seed{'s' * (seeds > 1)}; " if seeds else ""
  return f"```\n{about['command']}\n```\n\n" + wrap(
    f"[Record](../benchmarks/results/{name}.json): {of_seeds}"
    f"{about['machine']}; commit {about['commit']}."
  )
