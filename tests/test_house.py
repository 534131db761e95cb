"""Laws of the library: imports, packaging, annotations, sizes, names."""

import ast
import collections
import functools
import importlib.metadata
import pathlib
import re
import runpy
import subprocess
import sys
import tomllib

import pytest
from helpers import runs
from helpers.source import Source

import sparse_transformer
from sparse_transformer import schema, version

REPO = runs.REPO
PACKAGE = REPO / "sparse_transformer"
TESTS = REPO / "tests"
BENCHMARKS = REPO / "benchmarks"
DOCS = REPO / "docs"

# What each package may import, besides itself. Commands may import everything.
LEAVES = {"atomic", "tables", "machine", "schema", "signals", "version"}
LEAVES |= {"programs"}
MAY_IMPORT = {
  **{leaf: set() for leaf in LEAVES},
  "config": {"atomic", "schema"},
  "progress": {"signals"},
  "patterns": set(),
  "data": {"atomic"},
  "figures": {"atomic", "patterns"},
  "attention": {"patterns"},
  "model": {"patterns", "attention", "schema", "progress"},
  "training": LEAVES
  | {"config", "progress", "patterns", "data", "figures", "attention", "model"},
  "targets": LEAVES | {"config", "patterns", "attention", "model", "training"},
}
# And those within a package, which know no other file than these.
WITHIN = {
  "attention/content": {"contract", "heads", "online_softmax"},
  "attention/backends": {
    "contract",
    "heads",
    "orders",
    "online_softmax",
    "platforms",
    "content",
  },
  "training/distributed": set(),
  "training/checkpoints": {"distributed", "step"},
  "training/reports": {"costs", "distributed"},
  "training/evaluation": {
    *("checkpoints", "distributed", "experiment", "kernel_check", "step")
  },
}
# The tokens of each room, at most: names, operators, numbers and strings, which
# grow with the number of things to keep in mind. Lines, comments and docstrings
# are free. PYTHONPATH=.:tests python tests/test_house.py writes the table anew.
LIMITS = {
  "attention": 41_154,
  "benchmarks": 31_956,
  "commands": 20_289,
  "data": 14_345,
  "figures": 2_794,
  "library": 141_063,
  "model": 16_113,
  "patterns": 15_623,
  "targets": 4_189,
  "tests": 174_886,
  "training": 26_556,
}
# Fields that no config file sets, by the reason for which they exist.
UNSET = {
  "of the machine": "attention.backend attention.check train.accumulation"
  " model.remat mesh.data mesh.fsdp mesh.sequence mesh.tensor",
  "of one run": "train.seed train.init_from train.init_partial checkpoint.keep",
  "of data that a user has": "data.documents data.vocab_size data.noise"
  " data.sizes data.splits",
  "of options that were compared": "optimizer.beta1 model.max_span",
  "of runs that may become longer": "optimizer.schedule optimizer.minimum",
}
# Names of several functions or classes of a package, by the reason.
TWICE = {
  "the interface of backends": "attention.forward attention.backward"
  " attention.attend",
  "said with their module": "model.measure training.load training.render"
  " training.save",
}
COMMANDS = "sample", "explain", "compare", "report", "export", "convert"


@functools.cache
def sources():
  """{path: syntax tree} for the library and the scripts."""
  paths = [*sorted(PACKAGE.rglob("*.py")), REPO / "train.py", REPO / "eval.py"]
  return {path: ast.parse(path.read_text(), path.name) for path in paths}


def where(path, node):
  return f"{path.relative_to(REPO)}:{node.lineno}"


# Imports.


def room_of(path):
  """The package of a file, or "commands"."""
  if PACKAGE not in path.parents or path.name == "__main__.py":
    return "commands"
  name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
  others = "cli", "comparison", PACKAGE.name
  return "commands" if name in (*COMMANDS, *others) else name


def imported(tree):
  """(node, full dotted name) for everything that a file imports, anywhere."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from ((node, alias.name) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, "relative imports are not followed by this test"
      yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def test_imports_between_packages_go_one_way():
  upward = []
  for path, tree in sources().items():
    room = room_of(path)
    if room in ("commands", "__init__"):
      continue
    assert room in MAY_IMPORT, f"{path}: add its package to MAY_IMPORT"
    for node, name in imported(tree):
      top, *rest = name.split(".")
      if top in ("train", "eval", "configs", "tests", "benchmarks"):
        upward.append(f"{where(path, node)}: {room} imports {name}")
      elif top == "sparse_transformer" and rest:
        if rest[0] not in MAY_IMPORT[room] | {room}:
          upward.append(f"{where(path, node)}: {room} imports {rest[0]}")

  assert not upward, "\n".join(upward)


@pytest.mark.parametrize("package", ["attention", "patterns"])
def test_other_packages_see_the_face_of(package):
  begin = f"sparse_transformer.{package}."
  offered = imported(sources()[PACKAGE / package / "__init__.py"])
  face = {name.rpartition(".")[2] for _, name in offered}
  inner = {path.stem for path in (PACKAGE / package).iterdir()} - face
  assert [
    where(path, node)
    for path, tree in sources().items()
    if room_of(path) not in ("attention", "patterns")
    for node, name in imported(tree)
    if name.startswith(begin) and name.split(".")[2] in inner
  ] == []


def test_imports_within_a_package_go_one_way():
  found = {room: set() for room in WITHIN}
  for path, tree in sources().items():
    room = path.parent.relative_to(REPO).as_posix().partition("/")[2]
    for _, name in imported(tree):
      top, package, *rest = (*name.split("."), "")
      if room in WITHIN and top == "sparse_transformer":
        if package == room.partition("/")[0]:
          found[room].add(rest[0])

  assert {room: x - {room.partition("/")[2]} for room, x in found.items()} == (
    WITHIN
  )


def test_no_two_files_have_the_same_name():
  stems = [path.stem for path in PACKAGE.rglob("*.py")]
  twins = collections.Counter(x for x in stems if not x.startswith("__"))
  assert [name for name, count in twins.items() if count > 1] == []


def loaded_by(*command, lacks=()):
  """The modules loaded when a command ends, and the completed process."""
  script = (
    "import atexit, runpy, sys\n"
    f"sys.modules.update(dict.fromkeys({lacks}))\n"  # they are not found
    "atexit.register(lambda: print('LOADED', *sys.modules))\n"
    "kind, name, *sys.argv[1:] = sys.argv[1:]\n"
    "sys.argv[0] = name\n"
    "if kind == 'import': exec(name)\n"
    "elif kind == 'module': runpy.run_module(name, run_name='__main__')\n"
    "else: runpy.run_path(name, run_name='__main__')\n"
  )
  done = runs.python("-c", script, *command)
  modules = set(done.stdout.rpartition("LOADED ")[2].split())

  assert "sys" in modules, done.stderr
  return modules, done


EXTRAS = {*version.EXTRAS["train"], *version.EXTRAS["data"]}


@pytest.mark.parametrize(
  "statement, heavy",
  [
    ("import sparse_transformer.patterns", {"jax", *EXTRAS}),
    ("from sparse_transformer.attention import attend", EXTRAS),
    ("import sparse_transformer.data", {"jax", *EXTRAS}),
    ("import sparse_transformer.config", {"jax", "orbax", "matplotlib"}),
  ],
)
def test_import_loads_no_more_than_its_package_needs(statement, heavy):
  modules, done = loaded_by("import", statement)
  assert done.returncode == 0, done.stderr
  assert not heavy & modules


MISSPELT = {
  "train": ("script", "train.py"),
  "eval": ("script", "eval.py", "--workdir=unused"),
  **{
    name: ("module", f"sparse_transformer.{name}")
    for name in (*COMMANDS, "data")
  },
}


@pytest.mark.parametrize("name", MISSPELT)
@pytest.mark.parametrize("lacks", ["absl", "ml_collections"])
def test_command_without_its_extra_says_what_to_install(name, lacks):
  _, done = loaded_by(*MISSPELT[name], lacks=[lacks])
  assert done.returncode == 1
  (line,) = done.stderr.splitlines()
  assert f": needs {lacks}; the wheel is the library, clone to train" in line
  assert line.endswith(": pip install '.[train]'")


# Packaging.


def test_every_folder_of_the_library_is_a_package():
  folders = {path.parent for path in sources() if PACKAGE in path.parents}
  assert [f for f in folders if not (f / "__init__.py").exists()] == []


def test_every_imported_library_is_declared():
  def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()

  declared = {}  # {distribution: its extra}
  for extra in ("", *version.EXTRAS):
    file = f"requirements-{extra}.txt" if extra else "requirements.txt"
    for line in (REPO / file).read_text().splitlines():
      # An extra may bound what the library needs anyway.
      declared.setdefault(normal(re.split(r"[\s>=<\[;]", line)[0]), extra)

  distributions = importlib.metadata.packages_distributions()
  known = {"sparse_transformer", *sys.stdlib_module_names}
  missing = []
  extras = {name: e for e, names in version.EXTRAS.items() for name in names}
  for path, tree in sources().items():
    for node, name in imported(tree):
      top = name.split(".")[0]
      if top in known:
        continue
      found = {declared.get(normal(d)) for d in distributions.get(top, [])}
      if extras.get(top, "") not in found:
        missing.append(f"{where(path, node)}: {top} is not in its requirements")

  assert not missing, "\n".join(missing)


def test_a_release_is_said_alike_everywhere():
  """Its version, its date, and where it is from."""
  project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
  address = project["urls"]["Repository"]
  citation = (REPO / "CITATION.cff").read_text()
  readme = (REPO / "README.md").read_text()
  changes = (REPO / "CHANGELOG.md").read_text()
  number = sparse_transformer.__version__

  def said(field):
    return re.search(rf"(?m)^{field}: (.*)$", citation)[1]

  assert said("version") == number
  assert said("url") == said("repository-code") == address
  assert f"version = {{{number}}}" in readme
  # Changes since the release may stand above it.
  assert f"## {number} - {said('date-released')}\n" in changes

  owner, name = address.split("/")[-2:]
  own = rf"github\.com/[\w-]+/{name}\b|colab\.\S+?/github/[\w-]+/{name}\b"
  places = [REPO / "pyproject.toml", REPO / "CITATION.cff", REPO / "README.md"]
  for path in places:
    for link in re.findall(own, path.read_text()):
      assert link.endswith(f"/{owner}/{name}"), f"{path.name}: {link}"


def test_description_of_the_package_has_no_paths():
  """They would lead nowhere, where the page is not in the repository."""
  text = runpy.run_path(str(REPO / "setup.py"))["describe"]()
  place = f"/v{sparse_transformer.__version__}/"
  targets = re.findall(r"\]\(([^)]*)\)", text)
  assert [x for x in targets if not re.match("https?:|#", x)] == []
  files = [x.partition(place)[2].partition("#")[0] for x in targets]
  assert [x for x in files if x and not (REPO / x).exists()] == []
  pictures = [x for x in targets if f"/raw{place}" in x]
  assert len(pictures) == (REPO / "README.md").read_text().count(".png)") > 0


# Annotations and docstrings.


def public_functions():
  """(path, class or None, function) for the library's public functions."""
  for path, tree in sources().items():
    for node in tree.body:
      if isinstance(node, ast.FunctionDef):
        yield path, None, node
      elif isinstance(node, ast.ClassDef) and node.name[0] != "_":
        for member in node.body:
          if isinstance(member, ast.FunctionDef):
            yield path, node, member


def test_public_functions_are_annotated():
  missing = []
  for path, owner, function in public_functions():
    if re.match(r"_(?!_init__|_call__)", function.name):
      continue
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg]
    if owner and "@staticmethod" not in ast.unparse(function):
      arguments = arguments[1:]  # self
    bare = [x.arg for x in arguments if x and x.annotation is None]
    if function.returns is None and function.name != "__init__":
      bare.append("return")
    if bare:
      missing.append(f"{where(path, function)}: {function.name}: {bare}")

  assert not missing, "\n".join(missing)


def test_public_names_have_docstrings():
  """Files, classes and functions; `main` is described by its file."""
  missing = []
  for path, tree in sources().items():
    for node in (tree, *tree.body):
      name = getattr(node, "name", path.name)
      is_def = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
      is_public = is_def and name[0] != "_" and name != "main"
      if is_public and not ast.get_docstring(node):
        missing.append(f"{path.relative_to(REPO)}: {name}")

  assert not missing, "\n".join(missing)


def test_no_file_has_a_path_of_a_machine():
  """In the repository; tests, which make up such paths, are left out."""
  command = ["git", "ls-files", "-z"]
  if not (REPO / ".git").exists():
    pytest.skip("needs a git checkout")
  done = subprocess.run(
    command,
    cwd=REPO,
    capture_output=True,
    text=True,
  )
  place = re.compile(rb"(?<![\w.~>)/-])/(tmp|home|root|Users|mnt)/\w")
  named = [
    name
    for name in done.stdout.split("\0")
    if name and not name.startswith("tests/") and (REPO / name).exists()
    if place.search((REPO / name).read_bytes())
  ]

  assert done.returncode == 0
  assert len(done.stdout) > 1000
  assert not named


# The size of rooms, fields and names: what grows is taken back elsewhere.


def count_tokens(path):
  """The tokens of a file, without its comments and docstrings."""
  tokens, _ = Source(path).density()
  return tokens


def rooms():
  """{room: tokens}: of the library by package, of tests and of benchmarks."""
  found = collections.Counter()
  for path in sources():
    room = room_of(path)
    found[room if (PACKAGE / room).is_dir() else "commands"] += count_tokens(
      path
    )

  found["library"] = found.total()
  for folder in (TESTS, BENCHMARKS):
    found[folder.name] = sum(map(count_tokens, folder.rglob("*.py")))
  return dict(sorted(found.items()))


def test_no_room_has_more_tokens_than_its_limit():
  found = rooms()
  larger = [f"{x}: {found[x]}" for x in found if found[x] > LIMITS.get(x, 0)]
  assert not larger, (
    f"{', '.join(larger)}: make room, or write the table of limits, which a"
    " reviewer sees: PYTHONPATH=.:tests .venv/bin/python tests/test_house.py"
  )


def test_every_field_is_set_by_a_config_or_has_a_reason_to_exist():
  configs = (REPO / "configs").glob("*.py")
  text = "\n".join(path.read_text() for path in configs)
  unset = {x for x in schema.FIELDS if not re.search(rf"config\.{x}\b", text)}
  assert unset - {x for names in UNSET.values() for x in names.split()} == set()


def test_a_public_name_has_one_meaning_in_a_package():
  places = collections.defaultdict(set)
  for path, tree in sources().items():
    for node in tree.body:
      name = getattr(node, "name", "_")
      if name[0] != "_" and name != "main":
        places[f"{room_of(path)}.{name}"].add(path.name)

  twice = {name: paths for name, paths in places.items() if len(paths) > 1}
  allowed = {x for names in TWICE.values() for x in names.split()}

  assert twice.keys() == allowed, twice


if __name__ == "__main__":
  code = pathlib.Path(__file__)
  rows = "".join(f'  "{room}": {lines:_},\n' for room, lines in rooms().items())
  table = re.compile(r"^LIMITS = \{.*?\}$", re.DOTALL | re.MULTILINE)
  code.write_text(table.sub(f"LIMITS = {{\n{rows}}}", code.read_text()))
