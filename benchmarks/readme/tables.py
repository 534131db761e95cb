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
FACTOR = "Strided(128)"  # timed as a part of another pattern, and left out
LONG = 12_288  # positions, the least in the summary of the README
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
    f"Our run of the quickstart ended at {bits:.2f} bits/dim on the test split;"
    " versions and machines differ by a few hundredths. For comparison, a model"
    f" that treats pixels as independent scores {baseline:.2f}."
  )


def _attention_rows(case, program=None):
  rows = record.read(ATTENTION)["cases"][case]["rows"]
  return [row for row in rows if program in (None, row["program"])]


def _pattern(row):
  """The pattern of a row, in a short form."""
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
    f"On an {found['device']['name']}, a forward and backward pass of sparse"
    f" attention is **{min(ratios):.1f} to {max(ratios):.0f} times as fast as"
    f" one of cuDNN's dense causal attention**, for {min(lengths):,} to"
    f" {max(lengths):,} positions in bfloat16."
    " [Performance](docs/performance.md) lists every case, including those that"
    " gain less."
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
    "The following table shows the time of a forward and a backward pass"
    " together, for 8 heads of width 64 in bfloat16 on an"
    f" {found['device']['name']}. A batch contains 16 sequences of 3,072"
    " positions, 4 of 12,288 or 1 of 65,536. The *ideal speed-up* is what the"
    " speed-up would be if the time were proportional to the number of pairs."
    " The measured speed-up is smaller, because GPUs compute whole tiles, even"
    " if only some of their pairs belong to the pattern."
  )
  parts = wrap(first), tables.markdown(rows).rstrip(), wrap(_steps())
  return "\n\n".join(parts)


def _steps():
  """Times of steps, their MFU, and the MFU that dense networks would need."""
  entries = record.read(GPU)["presets"]["entries"]
  steps, dense = [], []
  for name, x in entries.items():
    if "step" in x:
      time = f"{1e3 * x['step']['median']:,.0f} ms"
      steps.append(f"`{name}` {time} ({100 * x['mfu']:.1f} %)")
      ratio = _flops(f"{name} attention.pattern=dense") / _flops(name)
      dense.append(f"{100 * x['mfu'] * ratio:.0f} %")
  return (
    "On the same GPU, a training step of 16 sequences takes the following time,"
    " with the model-FLOPs utilization (MFU) in brackets:"
    f" {', '.join(steps)}. To process as many tokens per second with dense"
    " causal attention, the same networks would need an MFU of"
    f" {', '.join(dense)}. Both CIFAR-10 steps were timed when `auto` still"
    " used cuDNN for windows and columns. It now uses Triton, which is faster"
    " in the table above."
  )


def _flops(preset):
  """FLOPs per token of a training step of a preset with changes."""
  model = Experiment(compiled.config_of(preset)).model
  return costs.flops_per_token(model)["total"]


def _gpu_cases(entries):
  """Cases that fill the GPU, by n and keys; dense ones at one n only."""
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
  """Measured beside ideal speed-ups, and the share of computed scores."""
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
    "With l = sqrt n, the number of pairs of `Local(l) | Strided(l)` grows as"
    " n^1.5. Its time grows as"
    f" n^{report.exponent(growth[:-1], PASS):.2f} from n = {first:,} to"
    f" {middle:,}, and as n^{report.exponent(growth[-2:], PASS):.2f} from there"
    f" to {last:,}. At n = {million['n']:,}, one head takes"
    f" {million[PASS]['median']:.0f} s and"
    f" {million['process_bytes'] / 2**30:.1f} GiB, measured once. Outputs and"
    " gradients with respect to queries agree with dense attention in float64"
    f" to {error:.0e}; for long sequences, only a sample of the rows was"
    " compared.".replace("e-0", "e-")
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
  """Hours and memory of each row of the paper, if they were recorded."""
  steps = record.read(GPU)["presets"]
  found = record.read("compiled")
  on_one = [x for x in found if x["target"] == compiled.H100]
  titles = "config", "steps", "hours on one H200", "GiB on one H100"
  rows = [(*titles, "change that makes it fit")]
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
    "Hours are the median time of a step on an"
    f" {steps['device']['name']}, multiplied by the number of steps in the"
    " config. They exclude validation and checkpoints. Memory is the peak that"
    " the compiler reports for a step; these steps were not run. All rows use"
    " rematerialization (`model.remat=block`). Without it, `enwik8` needs"
    f" {_gib(kept)} GiB."
  )
  if dirty:
    last += (
      f" The memory of {', '.join(dirty)} was measured on code with uncommitted"
      " changes, so the commit in its record ends in `-dirty`."
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
    f"In {number} comparisons of small networks, Muon's learning rate was tuned"
    " over few steps, with three to five candidates for each setting. The best"
    f" candidate was {first:g} for {most} of {best.total()} settings, {counts}."
    " Not every comparison tried the largest of these learning rates."
  )


def compiling() -> str:
  """How long planning and compiling take, by length."""
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
  """How far the rounds of the attention table deviate from their medians."""
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
    "In the table for `attention`, each time is the median over several rounds."
    f" The rounds deviate from it by at most {100 * max(large):.0f} %. At"
    " n = 3,072 and batch size 1, they deviate by up to"
    f" {100 * max(small):.0f} %, probably because the time of launching kernels"
    " dominates there."
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
  """What the released networks need, and what rounding to float16 changes."""
  found, split = record.read("released"), 10_000  # test images
  seconds, flops = found["processor_seconds"], found["flops_per_image"]
  return wrap(
    "To estimate the time of an evaluation, we scored the"
    f" {found['parameters'] / 1e6:.0f}M network with random weights."
    f" {found['images']} images take {seconds:.0f} s of one CPU core, so the"
    f" test split would take {seconds / found['images'] * split / 3600:.0f}"
    " hours. On"
    f" a GPU that sustains {GPU_SPEED / 1e12:.0f} TFLOP/s in float32, it would"
    f" take {flops * split / GPU_SPEED / 60:.1f} minutes. Converting the"
    f" {found['converted'] / 1e6:.0f}M network needs"
    f" {found['peak_bytes'] / 2**30:.1f} GiB of memory. The follow-up computed"
    " everything in float16, even the residual stream. In our network, this"
    f" changes the score by only {abs(found['float16_bits']):.0e}"
    " bits/dim.".replace("e-0", "e-")
  )


# {page: {part between markers: a function that makes its text or texts}}
PARTS: dict[str, dict[str, Callable[[], str | Iterator[str]]]] = {
  "README.md": {
    "quickstart": quickstart,
    "headline": headline,
    "trained": evidence.trained,
  },
  "docs/evidence.md": {
    "matches": evidence.found_matches,
    "far_keys": evidence.far_keys,
    "palestrina": evidence.palestrina,
    "without_networks": evidence.without_networks,
    "repeated": evidence.repeated,
    "columns": evidence.columns,
    "longer": evidence.longer,
    "depth": evidence.depth,
    "end_to_end": evidence.end_to_end,
    "dense_layers": evidence.dense_layers,
    "compressors": evidence.compressors,
  },
  "docs/data.md": {"orders": evidence.orders},
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
