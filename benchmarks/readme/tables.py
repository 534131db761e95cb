"""The README's tables of results, made from records."""

import importlib
import itertools
import re
from collections.abc import Callable
from typing import Any

from benchmarks import (
  compiled as benchmark,
  million as million_benchmark,
  plan as plan_benchmark,
  record,
  saving as saving_benchmark,
  spread as spread_benchmark,
)
from benchmarks.accelerator import summary
from benchmarks.readme import comparisons, evidence, records
from benchmarks.readme.text import wrap
from sparse_transformer import atomic, tables
from sparse_transformer.targets import rendering

PASS, OURS = "forward_backward", "ours"
# Records of runs that fit on a CPU, and their data.
TRAINED = {
  "digits": "8 x 8 digits of scikit-learn",
  "text_small": "the first 6 MB of an English Wikipedia export",
  "text_medium": "the same",
  "cifar10_small": "CIFAR-10",
  "genome": "E. coli K-12",
  "music": "two orchestral pieces",
}
LATER = ("text_medium",)  # shown as soon as there is a record
# Configs of published experiments, and their data.
PUBLISHED = {
  "cifar10": "CIFAR-10",
  "enwik8": "enwik8",
  "imagenet64": "ImageNet 64 x 64",
  "cifar10_15m": "CIFAR-10",
  "text8": "text8",
}


def trained() -> str:
  """Runs of configs that fit on a CPU."""
  names = [x for x in TRAINED if x not in LATER or records.exists(x)]
  runs = {name: records.read(name) for name in names}
  machines = " or ".join(sorted({run["machine"] for run in runs.values()}))
  titles = "config", "data", "result on the test split", "steps"
  rows = [(*titles, f"time on {machines}")]
  for name, run in runs.items():
    unit = run["evaluations"][0]["unit"]
    digits = 3 if unit == "bits/base" else 2
    bits = f"{records.test_bits(run):.{digits}f} {unit}"
    time = records.time_of(run)
    rows.append((f"`{name}`", TRAINED[name], bits, f"{run['steps']:,}", time))
  return tables.markdown(rows) + "\n"


def presets() -> str:
  """Configs of published experiments, as their files describe them."""
  rows = [("config", "data", "network", "published result")]
  for name, data in PUBLISHED.items():
    module = importlib.import_module(f"configs.{name}")
    text, config = " ".join(module.__doc__.split()), module.get_config()
    size = re.search(r"([\d,]+) parameters", text)
    result = re.search(r"Table.*?(\d\.\d\d bits/(dim|byte))", text)
    network = (
      f"{int(size[1].replace(',', '')) / 1e6:.1f}M parameters,"
      f" {config.model.num_layers} layers, {config.attention.pattern}"
    )
    rows.append((f"`{name}`", data, network, result[1] if result else ""))
  return tables.markdown(rows) + "\n"


def attention_rows(
  case: str, program: str | None = None
) -> list[dict[str, Any]]:
  """The rows of a case of benchmarks/attention.py, of one program or all."""
  rows = records.read("attention-amd-epyc-2-threads")["cases"][case]["rows"]
  return [r for r in rows if program in (None, r["program"])]


def speed() -> str:
  """Attention with our patterns at n = 12,288."""
  rows = [
    (
      "pattern",
      "ms",
      "speed-up",
      "ideal",
      "of peak",
      "computed/needed",
      "temporary MiB",
    )
  ]
  for row in attention_rows("12288", OURS):
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
  return tables.markdown(rows) + "\n"


def content() -> str:
  """Attention that follows the content, and with learned spans."""
  rows = [("pattern", "ms", "speed-up over `Causal()`")]
  for row in records.read("content")["rows"]:
    pattern, *spans = row["case"].split(", spans of ")
    name = ", spans of ".join([f"`{pattern}`", *spans])
    rows.append((name, f"{row['milliseconds']:,.0f}", f"{row['speed_up']:.1f}"))
  return tables.markdown(rows) + "\n"


def content_trained() -> str:
  """Networks with such patterns, trained as long as those with static ones."""
  return comparisons.short_table("content_patterns") + "\n"


def experts() -> str:
  """Mixtures of experts beside a dense MLP of the same FLOPs."""
  found = records.read("experts")
  dense, *others = found["rows"]
  times = (
    f"{row['milliseconds']:,.0f} ms for {row['case']}"
    f" ({1 / row['speed_up']:.2f} times as long)"
    for row in others
  )
  text = (
    f"For {found['tokens']:,} tokens of width 256, a dense MLP of inner width"
    f" 2,048 takes {dense['milliseconds']:,.0f} ms, forward and backward."
    " Mixtures of experts with the same FLOPs take, router included,"
    f" {' and '.join(times)}."
  )
  return wrap(text) + "\n\n"


def compiled() -> str:
  """Training steps as compiled for an H100."""
  rows = [
    ("preset", "attention by", "launches", "peak memory", "modelled time")
  ]
  for name in (
    "enwik8",
    "enwik8 model.remat=none",
    "enwik8 attention.backend=batched",
    "cifar10",
  ):
    program = compiled_report(name)["programs"][0]
    rows.append(
      (
        ", ".join(f"`{word}`" for word in name.split()),
        f"`{program['executor']}`",
        f"{program['launches']:,}",
        f"{program['memory']['peak'] / 2**30:.1f} GiB",
        f"{program['modelled']['seconds']:.2f} s",
      )
    )
  return tables.markdown(rows) + "\n"


def compiled_report(preset: str) -> dict[str, Any]:
  """The report on a preset, and changes to it, as compiled for an H100."""
  for report in records.read("compiled"):
    if (report["preset"], report["target"]) == (preset, "h100:1x1x1"):
      return report
  raise ValueError(
    f"benchmarks/results/compiled.json has no {preset} for an H100; make"
    " compiled writes it"
  )


def sampling() -> str:
  """Sampling with the caches of some patterns."""
  cases = records.read("sampling-amd-epyc-2-threads")["cases"]
  rows = [
    (
      "pattern",
      "cache",
      "symbols/s at position 12,000",
      "speed-up over no cache",
    )
  ]
  for case in cases.values():
    seconds = case["seconds at 12000"]
    without = case.get("seconds at no cache")
    rows.append(
      (
        f"`{', '.join(case['keys'])}`",
        f"{case['cache_bytes'] / 2**20:.0f} MiB",
        f"{1 / seconds:.0f}",
        f"{without / seconds:.0f}" if without else "",
      )
    )
  return tables.markdown(rows) + "\n"


def explained() -> str:
  """What explain --target says of a preset."""
  report = compiled_report("enwik8")
  command = (
    "python -m sparse_transformer.explain --config=configs/enwik8.py"
    " --target=h100"
  )
  return f"```\n{command}\n\n{rendering.render(report)}\n```\n\n"


def all_compiled() -> str:
  """All presets as compiled for GPUs and TPUs."""
  found = itertools.filterfalse(benchmark.is_on_mesh, records.read("compiled"))
  return benchmark.table(found) + "\n"


def measured() -> str:
  """What was measured on accelerators, at full size."""
  paths = sorted(record.FOLDER.glob("accelerator-*.json"))
  return summary.page(map(atomic.read_json, paths))


def meshes() -> str:
  """Presets on other meshes, as compiled for GPUs and TPUs."""
  return benchmark.meshes(records.read("compiled")) + "\n"


def plan() -> str:
  """A plan of runs on many devices."""
  return plan_benchmark.table(records.read("plan")["rows"]) + "\n"


def million() -> str:
  """Memory of a step whose positions are split."""
  return million_benchmark.text(records.read("million")) + "\n"


def spread() -> str:
  """What devices send each other if positions are split over them."""
  return spread_benchmark.table(records.read("spread")) + "\n"


def saving() -> str:
  """How long saving a checkpoint delays training."""
  return saving_benchmark.table(records.read("saving")) + "\n"


# By page: its parts between markers.
PARTS: dict[str, dict[str, Callable[[], str]]] = {
  "README.md": {
    "evidence": evidence.section,
    "trained": trained,
    "presets": presets,
    "speed": speed,
    "content": content,
    "content_trained": content_trained,
    "experts": experts,
    "compiled": compiled,
    "explained": explained,
    "sampling": sampling,
  },
  "docs/accelerators.md": {"compiled": all_compiled, "measured": measured},
  "docs/scaling.md": {
    "spread": spread,
    "meshes": meshes,
    "million": million,
    "plan": plan,
    "saving": saving,
  },
}
