"""Laws of how the library is written: density, keywords, names, paragraphs.

A reader should understand a file at the first reading. Lines are free, and so
are comments and docstrings. The number of things is limited by `LIMITS` in
test_house.py, and here, how many of them a line, a function or a call holds.

`PYTHONPATH=.:tests python tests/test_style.py` prints what is measured.
"""

import ast
import functools

from helpers import runs
from helpers.source import Source

PACKAGE = runs.REPO / "sparse_transformer"

# At most, over all files, per 1,000 lines of code.
MOST = {
  "parallel assignments": 8,  # a, b = c, d
  "comprehensions": 30,
  "starred expressions": 12,
  "starred arguments": 4,
}
# At least, over all files: own-line comments per 1,000 lines of code, the share
# of blank lines in functions, and of docstrings in all lines.
LEAST = {"comments": 60, "blank lines": 0.06, "docstrings": 0.17}
# Tokens in a line of code, at most: over all files, in a file, in a function of
# ten lines or more.
OF_LIBRARY, OF_FILE, OF_FUNCTION = 8.3, 10, 12
# Names that a function binds, besides its arguments and inner functions.
NAMES = 24
# Words that may name anything. So many bindings in all files, at most.
EMPTY_WORDS = {"about", "found", "given", "others"}
MOST_EMPTY = 10
# Constructors of records with more fields name each value.
FIELDS = 3


@functools.cache
def sources():
  scripts = [runs.REPO / "train.py", runs.REPO / "eval.py"]
  return [Source(path) for path in [*sorted(PACKAGE.rglob("*.py")), *scripts]]


def nodes(*kinds):
  """(source, node) for all nodes of some kinds."""
  for source in sources():
    for node in ast.walk(source.tree):
      if isinstance(node, kinds):
        yield source, node


def is_parallel(node):
  return (
    isinstance(node, ast.Assign)
    and isinstance(node.targets[0], ast.Tuple)
    and isinstance(node.value, ast.Tuple)
  )


def has_starred(call):
  return any(isinstance(x, ast.Starred) for x in call.args)


def measure():
  """{what: number} over all files, in the units of `MOST` and `LEAST`."""
  code = sum(source.density()[1] for source in sources())
  lines = sum(len(source.lines) for source in sources())
  comments = sum(
    line.strip().startswith("#") for x in sources() for line in x.lines
  )
  docstrings = sum(len(source.docstrings) for source in sources())
  kinds = ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.SetComp
  counts = {
    "parallel assignments": sum(is_parallel(x) for _, x in nodes(ast.Assign)),
    "comprehensions": sum(1 for _ in nodes(*kinds)),
    "starred expressions": sum(1 for _ in nodes(ast.Starred)),
    "starred arguments": sum(has_starred(x) for _, x in nodes(ast.Call)),
    "comments": comments,
  }
  in_functions = blank = 0
  for source, node in nodes(ast.FunctionDef):
    numbers = range(node.lineno, node.end_lineno + 1)
    in_functions += sum(map(source.is_code, numbers))
    blank += sum(
      not source.lines[i - 1].strip()
      for i in numbers
      if i not in source.docstrings
    )
  rates = {name: 1000 * count / code for name, count in counts.items()}
  shares = {
    "blank lines": blank / in_functions,
    "docstrings": docstrings / lines,
  }
  return rates | shares


def test_constructs_that_hold_several_thoughts_are_rare():
  measured = measure()
  over = {x: measured[x] for x in MOST if measured[x] > MOST[x]}
  under = {x: measured[x] for x in LEAST if measured[x] < LEAST[x]}
  assert not over and not under


def test_library_is_not_dense():
  tokens, lines = map(sum, zip(*(x.density() for x in sources()), strict=True))
  assert tokens / lines <= OF_LIBRARY


def test_no_file_is_dense():
  dense = []
  for source in sources():
    tokens, lines = source.density()
    if lines and tokens / lines > OF_FILE:
      dense.append(
        f"{source.path.relative_to(runs.REPO)}: {tokens / lines:.1f}"
      )
  assert not dense, "\n".join(dense)


def test_no_function_is_dense():
  dense = []
  for source, node in nodes(ast.FunctionDef):
    tokens, lines = source.density(node.lineno, node.end_lineno)
    if lines >= 10 and tokens / lines > OF_FUNCTION:
      dense.append(f"{source.place(node)} {node.name}: {tokens / lines:.1f}")
  assert not dense, "\n".join(dense)


def bound_names(function):
  """Names that a function binds; inner functions have their own."""
  names, left = set(), list(function.body)
  while left:
    node = left.pop()
    if isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
      continue
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
    left.extend(ast.iter_child_nodes(node))
  return names


def test_a_function_has_few_names():
  many = []
  for source, node in nodes(ast.FunctionDef):
    if (number := len(bound_names(node))) > NAMES:
      many.append(f"{source.place(node)} {node.name}: {number}")
  assert not many, "\n".join(many)


def test_names_say_what_they_are():
  places = []
  for source, node in nodes(ast.Name, ast.arg):
    name = node.arg if isinstance(node, ast.arg) else node.id
    is_bound = isinstance(node, ast.arg) or isinstance(node.ctx, ast.Store)
    if is_bound and name in EMPTY_WORDS:
      places.append(f"{source.place(node)} {name}")
  assert len(places) <= MOST_EMPTY, "\n".join(places)


def records():
  """{name of a dataclass or NamedTuple: the number of its fields}."""
  sizes = {}
  for _, node in nodes(ast.ClassDef):
    made_by = map(ast.unparse, (*node.decorator_list, *node.bases))
    if any("dataclass" in x or "NamedTuple" in x for x in made_by):
      fields = [x for x in node.body if isinstance(x, ast.AnnAssign)]
      sizes[node.name] = len(fields)
  return sizes


def test_values_of_a_record_are_named_where_it_is_made():
  anonymous, sizes = [], records()
  for source, call in nodes(ast.Call):
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    is_long = sizes.get(name, 0) > FIELDS and len(call.args) > FIELDS
    if name in sizes and (is_long or has_starred(call)):
      anonymous.append(f"{source.place(call)} {name}")
  assert not anonymous, "\n".join(anonymous)


if __name__ == "__main__":
  for name, value in measure().items():
    print(f"{name:24} {value:8.3f}")
