"""The parts of pages that are made from records."""

import functools
import re
import textwrap
from collections.abc import Callable, Collection, Iterator

from benchmarks import compiled, record, report
from benchmarks.accelerator import summary
from benchmarks.readme import evidence
from sparse_transformer import atomic, tables
from sparse_transformer.targets import compilers

PASS, OURS = "forward_backward", "ours"
ATTENTION = "attention-amd-epyc-2-threads"
FACTORS = "`Strided(128)`", "`Block(128)`", "`Summary(128, 32)`"  # of others
GPU_SPEED = 20e12  # FLOP/s in float32 that a large GPU sustains, by estimate


def wrap(text: str) -> str:
  return textwrap.fill(text, 100, break_on_hyphens=False)


def quickstart() -> str:
  bits = record.test_scores(record.read("digits"))[0]["bits_per_dim"]
  baseline = record.read("baselines_digits")["rows"][0]["test"]
  return wrap(
    f"It ends at about {bits:.2f} bits/dim on the test split, where a model of"
    f" independent pixels scores {baseline:.2f}."
  )


def _attention_rows(case, program=None):
  rows = record.read(ATTENTION)["cases"][case]["rows"]
  return [row for row in rows if program in (None, row["program"])]


def _pattern(row):
  """The pattern of a row, without the names of its arguments."""
  short = re.sub(r"block=([0-9]+).*", r"\1)", row["pattern"])
  return f"`{short}`"


def speed() -> str:
  """Attention at n = 12,288, and how many times as long others take."""
  machine = record.read(ATTENTION)["machine"]
  text = wrap(
    "Forward and backward pass, n = 12,288, float32, 4 heads of width 64, on"
    f" {machine['threads']} cores of an {machine['name']}. The other two"
    " compute dense attention:"
  )
  dense = {
    row["program"]: row[PASS]["median"]
    for row in _attention_rows("12288")
    if row["pattern"] == report.DENSE and PASS in row
  }
  titles = "pattern", "keys per query", "ms", "torch SDPA takes"
  rows = [(*titles, "`jax.nn` takes", "temporary MiB")]
  for row in _attention_rows("12288", OURS):
    if _pattern(row) in FACTORS:
      continue
    seconds = row[PASS]["median"]
    times = (dense[name] / seconds for name in ("sdpa", "jax_nn"))
    cells = f"{row['pairs'] / row['n']:,.0f}", f"{1e3 * seconds:,.0f}"
    others = (f"{x:.2g} x" if x < 10 else f"{x:.0f} x" for x in times)
    temp = f"{row['temp_bytes'] / 2**20:.0f}"
    rows.append((_pattern(row), *cells, *others, temp))
  return f"{text}\n\n{tables.markdown(rows)}"


def efficiency() -> str:
  """How far attention is from what pairs and the machine allow."""
  titles = "n", "pattern", "ms", "speed-up", "ideal"
  rows = [(*titles, "computed/needed")]
  for case in ("3072", "12288"):
    for row in _attention_rows(case, OURS):
      numbers = (f"{x:.1f}" for x in (row["speedup"][PASS], row["ideal"]))
      times = f"{1e3 * row[PASS]['median']:,.0f}", *numbers
      cells = f"{row['n']:,}", _pattern(row), *times
      rows.append((*cells, f"{row['computed_per_pair']:.2f}"))
  return tables.markdown(rows)


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
  cases = (_attention_rows(x, OURS) for x in ("oracle", "3072", "12288"))
  error = max(x for rows in cases for y in rows for x in y.get("errors", []))
  return f"{tables.markdown(rows)}\n" + wrap(
    "With l = sqrt n, the time of `Local(l) | Strided(l)` grows as"
    f" n^{report.exponent(growth[:-1], PASS):.2f} from n = {first:,} to"
    f" {middle:,}, and as n^{report.exponent(growth[-2:], PASS):.2f} from there"
    f" to {last:,}: its pairs grow as n^1.5. At n = {million['n']:,},"
    f" one head takes {million[PASS]['median']:.0f} s and"
    f" {million['process_bytes'] / 2**30:.1f} GiB in one round. Outputs and"
    " gradients of queries agree with dense float64 to"
    f" {error:.0e}, on a sample of rows at long n.".replace("e-0", "e-")
  )


def groups() -> str:
  titles = "program", "pattern", "documents", "forward, ms"
  rows = [(*titles, "forward + backward, ms", "temporary MiB")]
  for row in record.read("groups")["cases"]["groups"]["rows"]:
    temp, names = row["temp_bytes"], (row["program"], row["pattern"])
    cells = *(f"`{name}`" for name in names), str(row["documents"] or "-")
    temp = f"{temp / 2**20:,.0f}" if temp else "-"
    rows.append((*cells, *_times(row), temp))
  return tables.markdown(rows)


def _times(row):
  passes = (row.get(name) for name in report.PASSES)
  return [f"{1e3 * x['median']:,.0f}" if x else "-" for x in passes]


def explained() -> str:
  """The output of explain --target for a preset."""
  found = {(x["preset"], x["target"]): x for x in record.read("compiled")}[
    "enwik8", "h100:1x1x1"
  ]
  words = "--config=configs/enwik8.py --target=h100"
  command = f"python -m sparse_transformer.explain {words}"
  text = re.sub(r"(?m)^(.{97}).{4,}$", r"\1...", compilers.render(found))
  return f"```\n{command}\n\n{text}\n```"


def measured(parts: Collection[str] = tuple(summary.PARTS)) -> str:
  paths = sorted(record.FOLDER.glob("accelerator-*.json"))
  return summary.page(map(atomic.read_json, paths), parts)


def released() -> str:
  """What the released networks need, and what their rounding changes."""
  found, split = record.read("released"), 10_000  # test images
  seconds, flops = found["processor_seconds"], found["flops_per_image"]
  return wrap(
    f"With random weights, {found['images']} images of the"
    f" {found['parameters'] / 1e6:.0f}M network take {seconds:.0f} s of a CPU"
    f" core, so that the test split takes"
    f" {seconds / found['images'] * split / 3600:.0f} hours; on a GPU, by"
    f" estimate, {flops * split / GPU_SPEED / 60:.1f} minutes, at"
    f" {GPU_SPEED / 1e12:.0f} TFLOP/s in float32. To convert the"
    f" {found['converted'] / 1e6:.0f}M network takes"
    f" {found['peak_bytes'] / 2**30:.1f} GiB. On their GPUs, all was in"
    " float16, the residual stream too: in ours, that changed"
    f" {abs(found['float16_bits']):.0e} bits/dim.".replace("e-0", "e-")
  )


# By page: its parts between markers, each a text or several.
PARTS: dict[str, dict[str, Callable[[], str | Iterator[str]]]] = {
  "README.md": {
    "quickstart": quickstart,
    "speed": speed,
    "measured": lambda: measured(("attention", "presets", "train")),
    "trained": evidence.trained,
  },
  "docs/evidence.md": {
    "video": evidence.video,
    "equal_time": evidence.equal_time,
    "frames": evidence.frames,
    "columns": evidence.columns,
    "one_key": evidence.one_key,
    "planes": evidence.planes,
    "compressors": evidence.compressors,
    "listops": evidence.listops,
    "orders": evidence.orders,
  },
  "benchmarks/results/README.md": {"commands": evidence.commands},
  "docs/paper.md": {"released": released},
  "weights/README.md": {
    name: functools.partial(evidence.card, name)
    for name in ("digits", "cifar10_medium")
  },
  "docs/speed.md": {"efficiency": efficiency, "peers": peers, "groups": groups},
  "docs/accelerators.md": {
    "explained": explained,
    "compiled": lambda: compiled.table(record.read("compiled")),
    "kernels": lambda: compiled.kernel_table(record.read("kernels")),
    "measured": measured,
  },
}
