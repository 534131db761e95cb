"""Laws of README and docs: links, order, names, code, numbers."""

import itertools
import json
import re
import subprocess

import pytest
from helpers import runs

from sparse_transformer import config as config_lib
from sparse_transformer.data import SOURCES

REPO = runs.REPO
PACKAGE = REPO / "sparse_transformer"
DOCS = REPO / "docs"
SITE = sorted(DOCS.glob("*.md"))
PAGES = (REPO / "README.md", REPO / "weights" / "README.md", *SITE)
NOTEBOOKS = tuple(sorted(DOCS.glob("*.ipynb")))
CODE = (*sorted(PACKAGE.rglob("*.py")), REPO / "train.py", REPO / "eval.py")


def name_of(page):
  return str(page.relative_to(REPO))


def lines_of(page):
  """(number, line) of the text, without tables and code."""
  in_code = False
  for number, line in enumerate(page.read_text().splitlines(), 1):
    if line.startswith("```"):
      in_code = not in_code
    elif not in_code and line[:1] != "|":
      yield number, line


DEFINED = re.compile(r'DEFINE_\w+\(\s*"(\w+)"')  # a flag


def text_of(paths):
  return "\n".join(path.read_text() for path in paths)


def links_of(page):
  """(path, anchor) of the links to files of the repository."""
  text = page.read_text()
  if page.suffix == ".ipynb":
    text = ""
    for cell in json.loads(page.read_text())["cells"]:
      if cell["cell_type"] == "markdown":
        text += "".join(cell["source"]) + "\n"

  for link in re.findall(r"\]\(([^)]*)\)", text):
    if not link.startswith("http"):
      path, _, anchor = link.partition("#")
      yield (page.parent / path).resolve() if path else page, anchor


def anchors_of(page):
  """What links to headings end in."""
  anchors = set()
  for _, line in lines_of(page):
    if line.startswith("#"):
      words = re.sub(r"[^\w\s-]", "", line.strip("# ").lower())
      anchors.add(words.replace(" ", "-"))
  return anchors


@pytest.mark.parametrize("page", PAGES + NOTEBOOKS, ids=name_of)
def test_links_of_a_page_lead_somewhere(page):
  broken = []
  for path, anchor in links_of(page):
    if not path.exists() or (anchor and anchor not in anchors_of(path)):
      broken.append(f"{path.name}#{anchor}")
  assert broken == []


def test_pages_have_one_order_in_index_and_navigation_and_links():
  index = DOCS / "README.md"
  pages = [path for path, _ in links_of(index)][1:]  # after the README
  assert sorted(pages) == sorted({*SITE, *NOTEBOOKS} - {index})

  # Notebooks are also pages of the site.
  names = [page.with_suffix(".md").name for page in (index, *pages)]
  navigation = (REPO / "mkdocs.yml").read_text()
  assert re.findall(r": (\w+\.md)", navigation) == names

  for page, following in itertools.pairwise([*pages, None]):
    links = [path for path, _ in links_of(page)]
    assert index in links[-2:], f"{page.name} lacks a link to the index"
    is_next = following in (None, links[-1])
    assert is_next, f"{page.name}: wrong next"


@pytest.mark.parametrize(
  "name",
  [
    "README",
    "docs/evidence",
    "docs/performance",
    "docs/backends",
  ],
)
def test_no_number_of_a_page_is_typed_by_hand(name):
  """Results come from records, by make results."""
  text = (REPO / f"{name}.md").read_text()
  made = r"(?s)<!-- made by.*?<!-- end -->|```.*?```|`[^`]*`|\]\([^)]*\)"
  made += r"|(?:Python|JAX) [\d.]+(?: to [\d.]+)?"
  assert re.findall(r".*\d\.\d{2,}.*", re.sub(made, "", text)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_names_only_what_exists(page):
  text = re.sub(r"(?ms)^```diff$.*?^```$", "", page.read_text())
  missing = []
  scripts = re.findall(r"python ([\w/]+\.py)", text)
  scripts += re.findall(r"\b(?:configs|benchmarks)/\w+\.py", text)
  scripts += re.findall(r"(?:sparse_transformer|tests|docs)/[\w/]+\.\w+", text)
  for script in scripts:
    if "NAME" not in script and not (REPO / script).exists():
      missing.append(script)

  for module in re.findall(r"python -m ([\w.]+)(?<!NAME)", text):
    path = REPO / module.replace(".", "/")
    is_script = path.with_suffix(".py").exists()
    if not is_script and not (path / "__main__.py").exists():
      missing.append(module)

  makefile = (REPO / "Makefile").read_text()
  for target in re.findall(r"(?:`|^)make ([\w-]+)", text, re.MULTILINE):
    if not re.search(rf"^{target}:", makefile, re.MULTILINE):
      missing.append(f"make {target}")

  assert missing == []


def test_what_is_installed_is_said_before():
  """As pip says nothing for minutes."""
  targets = [".venv/installed", ".venv/docs/installed"]
  done = subprocess.run(
    ["make", "-n", "-B", *targets, "PYTHON=python"],
    cwd=REPO,
    capture_output=True,
    text=True,
  )
  lines = re.findall("(?m)^(echo|.*pip install).*", done.stdout)
  assert [x.startswith("echo") for x in lines] == [True, False] * 2
  assert re.search("echo .*requirements.txt.* about [0-9]+ MB", done.stdout)


def test_every_flag_and_source_is_on_a_page():
  text = text_of(PAGES)
  flags = DEFINED.findall(text_of(CODE))
  names = [rf"--(no)?{flag}\b" for flag in flags]
  names += [f"`{source}`" for source in SOURCES]
  assert [name for name in names if not re.search(name, text)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_names_only_flags_and_fields_that_exist(page):
  benchmarks = (REPO / "benchmarks").rglob("*.py")
  code = text_of([*CODE, *benchmarks])
  known = {"help", "verbosity", "xla_gpu_deterministic_ops"}
  known |= {*DEFINED.findall(code)}
  known |= {f"no{x}" for x in re.findall(r'DEFINE_bool\(\s*"(\w+)"', code)}
  known |= {*re.findall(r'add_argument\(\s*"--([\w-]+)"', code)}
  config = config_lib.get_config()
  # Flags of pip and of schedulers are not ours.
  text = re.sub(r"\b(pip|srun|sbatch|gcloud)\b.*", "", page.read_text())
  unknown = []
  for flag in re.findall(r"(?<![\w-])--([a-z_][\w.-]*\w)", text):
    group, _, field = flag.removeprefix("config.").partition(".")
    if flag.startswith("config."):
      if group not in config or (field and field not in config[group]):
        unknown.append(flag)
    elif flag not in known:
      unknown.append(flag)

  assert unknown == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_names_only_tests_that_exist(page):
  tests = text_of((REPO / "tests").rglob("*.py"))
  named = re.findall(r"\b(test_\w+)(?![\w./])", page.read_text())
  assert [name for name in named if f"def {name}" not in tests] == []


@pytest.mark.docs
@pytest.mark.parametrize(
  "name",
  [
    "README",
    "docs/attend",
    "docs/patterns",
    "docs/architecture",
  ],
)
def test_python_code_of_a_page_runs(name):
  code = r"(?ms)^```python\n(.*?)^```$"
  blocks = re.findall(code, (REPO / f"{name}.md").read_text())
  assert blocks
  done = runs.python("-c", "\n".join(blocks))
  assert done.returncode == 0, done.stderr


@pytest.mark.docs
def test_diffs_of_a_page_fit_the_files():
  page = (DOCS / "architecture.md").read_text()
  for block in re.findall(r"(?ms)^```diff\n(.*?)^```$", page):
    assert block.count("\n") <= 30
    files = re.findall(r"(?ms)^\+{3} (\S+)\n(.*?)(?=^\+{3} |\Z)", block)
    for path, diff in files:
      old = [line[1:] for line in diff.splitlines() if line[:1] in "- "]
      # As iterators go on where they stopped, lines are found in their order.
      text = iter((REPO / path).read_text().splitlines() if old else ())
      assert [line for line in old if line not in text] == [], path
