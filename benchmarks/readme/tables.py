"""The parts of pages that are made from records."""

import collections
import functools
import re
import textwrap
from collections.abc import Callable, Iterator

from benchmarks import compiled, record, report, traffic
from benchmarks.accelerator import summary
from benchmarks.readme import evidence
from sparse_transformer import atomic, patterns, tables
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

PASS, OURS = "forward_backward", "ours"
ATTENTION = "attention-amd-epyc-2-threads"
GPU = "accelerator-nvidia-h200"
GPU_ATTENTION = f"{GPU}-triton-cudnn-hopper"
FACTOR = "Strided(128)"  # of another pattern
LONG = 12_288  # positions, from which a speed-up is told at first
# Rows of the paper and of the follow-up, as docs/paper.md lists them.
ROWS = (
  *("cifar10", "cifar10_dense", "cifar10_fixed"),
  *("enwik8", "enwik8_dense", "enwik8_strided", "imagenet64"),
  *("music_152m", "music_25m", "music_3m", "cifar10_58m", "cifar10_15m"),
  *("cifar10_150m", "cifar10_10m", "cifar10_2m"),
  *("imagenet64_150m", "imagenet64_300m"),
)
# Presets by length, whose steps show how long compiling takes.
LENGTHS = "cifar10", "enwik8_dense", "enwik8_strided", "music_152m"
LENGTHS += "music_25m", "music_3m"
GPU_SPEED = 20e12  # FLOP/s in float32 that a large GPU sustains, by estimate


def wrap(text: str) -> str:
  return textwrap.fill(text, 100, break_on_hyphens=False)


def quickstart() -> str:
  bits = record.test_scores(record.read("digits"))[0]["bits_per_dim"]
  baseline = record.read("baselines_digits")["rows"][0]["test"]
  return wrap(
    f"The quickstart ends at about {bits:.2f} bits/dim on the test split. A"
    f" model of independent pixels scores {baseline:.2f}."
  )


def _attention_rows(case, program=None):
  rows = record.read(ATTENTION)["cases"][case]["rows"]
  return [row for row in rows if program in (None, row["program"])]


def _pattern(row):
  """The pattern of a row, without the names of its arguments."""
  short = re.sub(r"block=([0-9]+).*", r"\1)", row["pattern"])
  return f"`{short}`"


def steps_traffic() -> Iterator[str]:
  found = record.read("traffic")
  yield traffic.table(found)
  about = dict.fromkeys(f"jax {x['jax']}, commit {x['commit']}" for x in found)
  yield f"Compiled with {'; '.join(about)}."


def headline() -> str:
  """How many times as fast as dense attention long sparse patterns are."""
  found = record.read(GPU_ATTENTION)["attention"]
  sparse = [
    case
    for case in _gpu_cases(found["entries"])
    if case["n"] >= LONG and case["pattern"] != report.DENSE
  ]
  ratios = [case["dense"] / case["seconds"] for case in sparse]
  lengths = [case["n"] for case in sparse]
  return wrap(
    f"On an {found['device']['name']}, the forward and backward pass of sparse"
    f" patterns is **{min(ratios):.1f} to {max(ratios):.0f} times as fast as"
    f" cuDNN's dense causal attention**, at {min(lengths):,} to"
    f" {max(lengths):,} positions in bfloat16."
    " [Performance](docs/performance.md) has every case, also those in which"
    " less is gained."
  )


def speed() -> str:
  """Attention on a GPU beside cuDNN's dense causal attention."""
  found = record.read(GPU_ATTENTION)["attention"]
  titles = "pattern", "n", "keys per query", "ideal speed-up", "ms"
  rows = [(*titles, "speed-up over cuDNN dense")]
  for case in _gpu_cases(found["entries"]):
    numbers = f"{case['n']:,}", f"{case['keys']:,.0f}", f"{case['ideal']:.1f}"
    times = f"{1e3 * case['seconds']:.2f}"
    speed_up = f"{case['dense'] / case['seconds']:.1f}"
    rows.append((f"`{case['pattern']}`", *numbers, times, speed_up))
  first = (
    "These are forward and backward passes of 8 heads of width 64 in bfloat16"
    f" on an {found['device']['name']}, for 16 sequences of 3,072 positions, 4"
    " of 12,288 or 1 of 65,536. *Ideal* is the speed-up if time were"
    " proportional to the number of pairs. The measured speed-up is smaller,"
    " because GPUs compute whole tiles, also where only some of their pairs"
    " belong to the pattern."
  )
  parts = wrap(first), tables.markdown(rows).rstrip(), wrap(_steps())
  return "\n\n".join(parts)


def _steps():
  """Steps on a GPU, their MFU, and that of dense networks at their speed."""
  entries = record.read(GPU)["presets"]["entries"]
  steps, dense = [], []
  for name, x in entries.items():
    if "step" in x:
      time = f"{1e3 * x['step']['median']:,.0f} ms"
      steps.append(f"`{name}` {time} ({100 * x['mfu']:.1f} %)")
      ratio = _flops(f"{name} attention.pattern=dense") / _flops(name)
      dense.append(f"{100 * x['mfu'] * ratio:.0f} %")
  return (
    "These are training steps of 16 sequences on the same GPU, with their"
    f" model-FLOPs utilization (MFU): {', '.join(steps)}. To process as many"
    " tokens a second, the same networks with dense causal attention would need"
    f" an MFU of {', '.join(dense)}. Both CIFAR-10 steps were timed before"
    " `auto` switched windows and columns from cuDNN to Triton, which is faster"
    " in the table above."
  )


def _flops(preset):
  """FLOPs of a token of a step of a preset with changes."""
  model = Experiment(compiled.config_of(preset)).model
  return costs.flops_per_token(model)["total"]


def _gpu_cases(entries):
  """Cases that fill the GPU, dense ones at one n only, by n and keys."""
  cases = []
  for x in entries.values():
    programs = x.get("programs", {})
    if summary.RIVAL not in programs or x["pattern"] == FACTOR:
      continue
    n, is_dense = x["n"], x["pattern"] == report.DENSE
    if n * x["batch"] < 40_000 or (is_dense and n != 12_288):
      continue
    chosen = programs["cudnn" if is_dense else "triton"]  # by `auto`
    ((pattern,),) = patterns.parse(x["pattern"])
    keys = pattern.pairs(n) / n
    case = dict(
      pattern=x["pattern"],
      n=n,
      keys=keys,
      ideal=(n + 1) / 2 / keys,
      seconds=chosen[PASS]["median"],
      dense=programs[summary.RIVAL][PASS]["median"],
    )
    cases.append(case)
  return sorted(cases, key=lambda case: (case["n"], case["keys"]))


def efficiency() -> str:
  """How far attention is from what pairs and the machine allow."""
  rows = [("pattern", "ms", "speed-up", "ideal", "computed/needed")]
  for row in _attention_rows("12288", OURS):
    numbers = (f"{x:.1f}" for x in (row["speedup"][PASS], row["ideal"]))
    times = f"{1e3 * row[PASS]['median']:,.0f}", *numbers
    rows.append((_pattern(row), *times, f"{row['computed_per_pair']:.2f}"))
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
  titles = "program", "pattern", "forward, ms"
  rows = [(*titles, "forward + backward, ms", "temporary MiB")]
  for row in record.read("groups")["cases"]["groups"]["rows"]:
    if not row["documents"]:
      continue
    temp, names = row["temp_bytes"], (row["program"], row["pattern"])
    temp = f"{temp / 2**20:,.0f}" if temp else "-"
    rows.append((*(f"`{name}`" for name in names), *_times(row), temp))
  return tables.markdown(rows)


def _times(row):
  passes = (row.get(name) for name in report.PASSES)
  return [f"{1e3 * x['median']:,.0f}" if x else "-" for x in passes]


def needs() -> str:
  """Hours and memory of each row of the paper, as far as records have them."""
  steps = record.read(GPU)["presets"]
  found = record.read("compiled")
  on_one = [x for x in found if x["target"] == compiled.H100]
  titles = "config", "steps", "hours on one H200", "GiB on one H100"
  rows = [(*titles, "what it takes to fit")]
  for name in ROWS:
    number = compiled.config_of(name).train.steps
    step = steps["entries"].get(name, {}).get("step")
    hours = f"{number * step['median'] / 3600:,.0f}" if step else "unknown"
    fitting = next(x for x in on_one if x["preset"] == name)
    peak = _gib(fitting)
    change = ""
    if not fitting["programs"][0]["fits"]:
      fitting = next(
        x
        for x in on_one
        if x["preset"].startswith(f"{name} ") and x["programs"][0]["fits"]
      )
      change = f"`{fitting['preset'].split()[1]}`: {_gib(fitting)}"
    rows.append((f"`{name}`", f"{number:,}", hours, peak, change))
  kept = next(x for x in on_one if x["preset"] == "enwik8 model.remat=none")
  dirty = [
    f"`{x['preset']}`"
    for x in on_one
    if x["preset"] in ROWS and x["commit"].endswith("-dirty")
  ]
  last = (
    f"Hours are the median step on an {steps['device']['name']} times the steps"
    " of the config, without validation and checkpoints. Memory is the peak of"
    " a compiled step, which was not run. All rows use rematerialization"
    " (`model.remat=block`). Without it, `enwik8` needs"
    f" {_gib(kept)} GiB."
  )
  if dirty:
    last += (
      f" The memory of {', '.join(dirty)} is of a tree with uncommitted changes"
      " (its commit ends in `-dirty`)."
    )
  return f"{tables.markdown(rows)}\n{wrap(last)}"


def _gib(report_of):
  """The peak memory of a compiled step."""
  (program,) = report_of["programs"]
  return f"{program['memory']['peak'] / 2**30:.1f}"


def rates() -> str:
  """How often each learning rate of Muon was the best in a comparison."""
  best: collections.Counter[float] = collections.Counter()
  number = 0
  for path in sorted(record.FOLDER.glob("*.json")):
    found = record.read(path.stem)
    tuning = found.get("tuning") if isinstance(found, dict) else None
    if not tuning:
      continue
    about = found["about"]
    is_muon = about["config"]["optimizer"]["name"] == "muon"
    if is_muon and about["tune"][0] == "optimizer.learning_rate":
      number += 1
      best.update(map(float, tuning["best"].values()))
  (first, most), *rest = best.most_common()
  counts = ", ".join(f"{rate:g} for {count}" for rate, count in rest)
  return wrap(
    f"In {number} comparisons of small networks that tuned Muon's rate over few"
    f" steps, the best of three to five candidates was {first:g} for {most} of"
    f" {best.total()} settings, {counts}. Not every comparison tried the"
    " largest rates."
  )


def compiling() -> str:
  """How long programs take to be planned and compiled, by length."""
  found = {
    x["preset"]: x
    for x in record.read("compiled")
    if x["target"] == compiled.H100
  }
  titles = "config", "positions", "tracing and planning, s", "compiling, s"
  rows = [(*titles, "commit")]
  for name in LENGTHS:
    (program,) = found[name]["programs"]
    length = Experiment(compiled.config_of(name)).model.length
    seconds = program["trace_seconds"], program["compile_seconds"]
    commit = found[name]["commit"]
    rows.append((f"`{name}`", f"{length:,}", *map(str, seconds), commit))
  return tables.markdown(rows)


def spread() -> str:
  """How far rounds of the attention table are from their medians."""
  entries = record.read(GPU_ATTENTION)["attention"]["entries"].values()
  small, large = [], []
  for x in entries:
    for program in x.get("programs", {}).values():
      if PASS in program:
        times = program[PASS]
        ends = times["min"], times["max"]
        far = max(abs(end / times["median"] - 1) for end in ends)
        (small if x["n"] * x["batch"] < 40_000 else large).append(far)
  return wrap(
    f"The rounds of the attention table lie within {100 * max(large):.0f} % of"
    f" their median. At n = 3,072 and batch 1, they lie within"
    f" {100 * max(small):.0f} %, probably because launches dominate there."
  )


def kernels() -> Iterator[str]:
  found = record.read("kernels")
  yield compiled.kernel_table(found)
  if text := evidence.changed(found):
    yield wrap(f"In the record, {text}")


def measured() -> str:
  paths = sorted(record.FOLDER.glob("accelerator-*.json"))
  return summary.page([*map(atomic.read_json, paths)])


def released() -> str:
  """What the released networks need, and what their rounding changes."""
  found, split = record.read("released"), 10_000  # test images
  seconds, flops = found["processor_seconds"], found["flops_per_image"]
  return wrap(
    f"With random weights, the {found['parameters'] / 1e6:.0f}M network takes"
    f" {seconds:.0f} s of one CPU core for {found['images']} images, so that"
    f" the test split takes {seconds / found['images'] * split / 3600:.0f}"
    " hours. On a GPU, we estimate"
    f" {flops * split / GPU_SPEED / 60:.1f} minutes, at"
    f" {GPU_SPEED / 1e12:.0f} TFLOP/s in float32. Converting the"
    f" {found['converted'] / 1e6:.0f}M network takes"
    f" {found['peak_bytes'] / 2**30:.1f} GiB. The follow-up computed everything"
    " in float16, also the residual stream. In our network, that changes the"
    f" score by {abs(found['float16_bits']):.0e} bits/dim.".replace("e-0", "e-")
  )


# By page: its parts between markers, each a text or several.
PARTS: dict[str, dict[str, Callable[[], str | Iterator[str]]]] = {
  "README.md": {
    "quickstart": quickstart,
    "headline": headline,
    "trained": evidence.trained,
  },
  "docs/evidence.md": {
    "repeated": evidence.repeated,
    "columns": evidence.columns,
    "longer": evidence.longer,
    "compressors": evidence.compressors,
    "orders": evidence.orders,
  },
  "benchmarks/results/README.md": {"commands": evidence.commands},
  "docs/train.md": {"rates": rates},
  "docs/paper.md": {"needs": needs, "released": released},
  "weights/README.md": {
    name: functools.partial(evidence.card, name)
    for name in ("digits", "cifar10_medium", "cifar10_large")
  },
  "docs/performance.md": {
    "traffic": steps_traffic,
    "speed": speed,
    "compiling": compiling,
    "efficiency": efficiency,
    "peers": peers,
    "groups": groups,
    "measured": measured,
    "spread": spread,
  },
  "docs/backends.md": {"kernels": kernels},
}
