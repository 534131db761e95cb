"""The parts of pages that are made from record."""

import functools
import importlib
import itertools
import re
from collections.abc import Callable, Collection, Iterator

import benchmarks.compiled
from benchmarks import record, report
from benchmarks.accelerator import parts as accelerator, summary
from benchmarks.readme import evidence
from benchmarks.readme.evidence import wrap
from sparse_transformer import atomic, tables
from sparse_transformer.targets import rendering

PASS, OURS = "forward_backward", "ours"
ATTENTION = "attention-amd-epyc-2-threads"


def quickstart() -> str:
  bits = record.test_scores(record.read("digits"))[0]["bits_per_dim"]
  baseline = record.read("baselines_digits")["rows"][0]["test"]
  return wrap(
    f"The quickstart ends with about {bits:.2f} bits/dim on the test split,"
    f" where a model of independent pixels scores {baseline:.2f}."
  )


def headline() -> str:
  name = "cifar10_keys"
  picture = f"![{evidence.COMPARISONS[name]}](docs/figures/{name}.png)"
  return f"{evidence.beside()}\n{picture}\n\n{wrap(evidence.summary(name))}"


def _attention_rows(case, program=None):
  """The rows of a case of benchmarks/attention.py, of one program or all."""
  rows = record.read(ATTENTION)["cases"][case]["rows"]
  return [row for row in rows if program in (None, row["program"])]


def speed() -> str:
  """Attention with our patterns at n = 12,288."""
  found = record.read(ATTENTION)
  jax, torch = found["versions"]["jax"]["jax"], found["versions"]["torch"]
  text = (
    "Forward + backward, float32, 4 heads of width 64, batch 1, n = 12,288, on"
    " {threads} cores of an {name}".format(**found["machine"])
    + f" with Python {found['python']}, jax {jax} and torch"
    f" {torch['torch'].partition('+')[0]}:"
  )
  titles = "pattern", "ms", "speed-up", "ideal", "of peak"
  rows = [(*titles, "computed/needed", "temporary MiB")]
  for row in _attention_rows("12288", OURS):
    pattern = re.sub(r"block=(\d+).*", r"\1)", row["pattern"])
    rows.append(
      (
        f"`{pattern}`",
        f"{1e3 * row[PASS]['median']:,.0f}",
        f"{row['speedup'][PASS]:.1f}",
        f"{row['ideal']:.1f}",
        f"{row['of_peak'][PASS]:.2f}",
        f"{row['computed_per_pair']:.2f}",
        f"{row['temp_bytes'] / 2**20:.0f}",
      )
    )
  return f"{wrap(text)}\n\n{tables.markdown(rows)}"


def peers() -> str:
  """Other libraries, growth with n, a million positions and errors."""
  rows = [("program", "pattern", "forward, ms", "forward + backward, ms")]
  found = sorted(_attention_rows("12288"), key=lambda row: row["pattern"])
  rivals = {row["pattern"] for row in found if row["program"] != OURS}
  for row in found:
    if row["pattern"] in rivals and "forward" in row:
      rows.append((f"`{row['program']}`", f"`{row['pattern']}`", *_times(row)))
  growth = _attention_rows("growth", OURS)
  first, *_, middle, last = [row["n"] for row in growth]
  (million,) = _attention_rows("million", OURS)
  cases = map(_attention_rows, ("oracle", "3072", "12288"))
  ours = [x for rows in cases for x in rows if x["program"] == OURS]
  error = max(error for row in ours for error in row.get("errors", []))
  return f"{tables.markdown(rows)}\n" + wrap(
    "With l = sqrt n, the time of `Local(l) | Strided(l)` grows as"
    f" n^{report.exponent(growth[:-1], PASS):.2f} from n = {first:,} to"
    f" {middle:,}, and as n^{report.exponent(growth[-2:], PASS):.2f} from there"
    f" to {last:,}: below the n^1.5 of its pairs, since overhead dominates at"
    f" small n. At n = {million['n']:,}, one head takes"
    f" {million[PASS]['median']:.0f} s and"
    f" {million['process_bytes'] / 2**30:.1f} GiB. All results agree with dense"
    f" float64 and with FlexAttention to {error:.0e}.".replace("e-0", "e-")
  )


def groups() -> str:
  """Grouped queries and packed documents, beside other libraries."""
  titles = "program", "pattern", "documents", "forward, ms"
  rows = [(*titles, "forward + backward, ms", "temporary MiB")]
  for row in record.read("groups")["cases"]["groups"]["rows"]:
    temp, names = row["temp_bytes"], (row["program"], row["pattern"])
    cells = *(f"`{name}`" for name in names), str(row["documents"] or "-")
    temp = f"{temp / 2**20:,.0f}" if temp else "-"
    rows.append((*cells, *_times(row), temp))
  return tables.markdown(rows)


def _times(row):
  """The median of each pass, in milliseconds."""
  passes = (row.get(name) for name in report.PASSES)
  return [f"{1e3 * x['median']:,.0f}" if x else "-" for x in passes]


def _of_benchmarks(*names):
  """The tables that benchmarks print, from their record."""

  def table(name):
    module = importlib.import_module(f"benchmarks.{name}")
    return module.table(record.read(name))

  return {name: functools.partial(table, name) for name in names}


def explained() -> str:
  """The output of explain --target for a preset."""
  found = {(x["preset"], x["target"]): x for x in record.read("compiled")}[
    "enwik8", "h100:1x1x1"
  ]
  words = "--config=configs/enwik8.py --target=h100"
  command = f"python -m sparse_transformer.explain {words}"
  return f"```\n{command}\n\n{rendering.render(found)}\n```"


def compiled() -> str:
  """All presets as compiled for GPUs and TPUs."""
  is_on_mesh = benchmarks.compiled.is_on_mesh
  found = itertools.filterfalse(is_on_mesh, record.read("compiled"))
  return benchmarks.compiled.table(found)


def measured(parts: Collection[str] = accelerator.PARTS) -> str:
  """What was measured on accelerators, at full size."""
  paths = sorted(record.FOLDER.glob("accelerator-*.json"))
  return summary.page(map(atomic.read_json, paths), parts)


# By page: its parts between markers, each a text or several.
PARTS: dict[str, dict[str, Callable[[], str | Iterator[str]]]] = {
  "README.md": {
    "quickstart": quickstart,
    "evidence": headline,
    "speed": speed,
    "measured": lambda: measured(("attention", "presets", "train")),
  },
  "docs/usage.md": {"explained": explained},
  "docs/evidence.md": {
    "trained": evidence.trained,
    "comparisons": evidence.comparisons,
    "earlier": evidence.earlier,
    "repeats": evidence.repeats,
    "contexts": evidence.contexts,
    **{
      part: functools.partial(evidence.baselines, *about)
      for part, about in evidence.BASELINES.items()
    },
  },
  "docs/speed.md": {
    "peers": peers,
    "groups": groups,
    **_of_benchmarks("content", "experts", "sampling"),
  },
  "docs/accelerators.md": {"compiled": compiled, "measured": measured},
  "docs/scaling.md": {
    "meshes": lambda: benchmarks.compiled.meshes(record.read("compiled")),
    **_of_benchmarks("spread", "million", "saving"),
  },
}
