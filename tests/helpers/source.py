"""A file of Python: its lines, tokens, docstrings and syntax."""

import ast
import collections
import io
import tokenize

from helpers import runs

TOKENS = {tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING}


class Source:
  """The lines, tokens and syntax of a file."""

  def __init__(self, path):
    self.path = path
    self.text = path.read_text()
    self.lines = self.text.splitlines()
    self.tree = ast.parse(self.text)
    self.docstrings = set()
    for node in ast.walk(self.tree):
      has_body = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
      if has_body and ast.get_docstring(node):
        first = node.body[0]
        self.docstrings |= {*range(first.lineno, first.end_lineno + 1)}
    self.tokens = self._count_tokens()  # by line

  def _count_tokens(self):
    by_line = collections.Counter()
    depth = 0  # of f-strings, each of which counts as one token
    for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
      name = tokenize.tok_name[token.type]
      is_counted = token.type in TOKENS or name == "FSTRING_START"
      if token.start[0] not in self.docstrings and is_counted and not depth:
        by_line[token.start[0]] += 1
      depth += (name == "FSTRING_START") - (name == "FSTRING_END")
    return by_line

  def is_code(self, number):
    line = self.lines[number - 1].strip()
    is_documented = number in self.docstrings
    return bool(line) and not line.startswith("#") and not is_documented

  def density(self, first=1, last=None):
    """(tokens, lines of code) between two lines."""
    numbers = range(first, (last or len(self.lines)) + 1)
    tokens = sum(self.tokens[i] for i in numbers)
    return tokens, sum(map(self.is_code, numbers))

  def place(self, node):
    return f"{self.path.relative_to(runs.REPO)}:{node.lineno}"
