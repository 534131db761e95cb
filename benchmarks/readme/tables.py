"""The parts of pages that are made from records."""

import functools
import re
import textwrap
from collections.abc import Callable, Iterator

from benchmarks import compiled, record, report
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
  """Attention on a GPU, and how many times as long dense attention takes."""
  found = record.read(GPU_ATTENTION)["attention"]
  titles = "pattern", "n", "keys per query", "pairs, x fewer", "ms"
  rows = [(*titles, "x as fast as cuDNN's dense"), *_gpu_rows(found["entries"])]
  first = (
    "Forward and backward pass of 8 heads of width 64 in bfloat16, on an"
    f" {found['device']['name']}: 16 sequences of 3,072, 4 of 12,288 or 1 of"
    " 65,536. Dense causal attention is cuDNN's, as is `Causal()` here. Time"
    " follows the tiles that hold pairs, so the speed-up is less than the"
    " saving in pairs:"
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
    "A training step of 16 sequences on it, with its model-FLOPs utilization"
    f" (MFU): {', '.join(steps)}. This MFU counts the weights and the pairs of"
    " the pattern, 12 FLOPs a pair and unit of width, and nothing that is"
    " computed again. For as many tokens a second, the same networks with dense"
    f" causal attention would need {', '.join(dense)}. Both CIFAR-10 steps are"
    " of a commit at which `auto` took cuDNN also for windows and columns. It"
    " now takes Triton's kernels, which are faster on those above."
  )


def _flops(preset):
  """FLOPs of a token of a step of a preset with changes."""
  model = Experiment(compiled.config_of(preset)).model
  return costs.flops_per_token(model)["total"]


def _gpu_rows(entries):
  """Cases that fill the GPU, dense ones at one n only, by n and keys."""
  rows = {}
  for x in entries.values():
    programs = x.get("programs", {})
    if summary.RIVAL not in programs or x["pattern"] == FACTOR:
      continue
    n, is_dense = x["n"], x["pattern"] == report.DENSE
    if n * x["batch"] < 40_000 or (is_dense and n != 12_288):
      continue
    chosen = programs["cudnn" if is_dense else "triton"]  # by `auto`
    both = chosen, programs[summary.RIVAL]
    ours, dense = (program[PASS]["median"] for program in both)
    ((pattern,),) = patterns.parse(x["pattern"])
    keys = pattern.pairs(n) / n
    fewer = f"{(n + 1) / 2 / keys:,.1f} x"
    cells = f"`{x['pattern']}`", f"{n:,}", f"{keys:,.0f}", fewer
    rows[n, keys] = *cells, f"{1e3 * ours:.2f}", f"{dense / ours:.1f} x"
  return [row for _, row in sorted(rows.items())]


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
    "trained": evidence.trained,
  },
  "docs/evidence.md": {
    "video": evidence.video,
    "equal_time": evidence.equal_time,
    "frames": evidence.frames,
    "beside_counts": evidence.beside_counts,
    "repeated": evidence.repeated,
    "columns": evidence.columns,
    "one_key": evidence.one_key,
    "longer": evidence.longer,
    "planes": evidence.planes,
    "compressors": evidence.compressors,
    "orders": evidence.orders,
  },
  "benchmarks/results/README.md": {"commands": evidence.commands},
  "docs/paper.md": {"released": released},
  "weights/README.md": {
    name: functools.partial(evidence.card, name)
    for name in ("digits", "cifar10_medium", "cifar10_large")
  },
  "docs/speed.md": {"efficiency": efficiency, "peers": peers, "groups": groups},
  "docs/accelerators.md": {
    "kernels": kernels,
    "measured": measured,
  },
}
