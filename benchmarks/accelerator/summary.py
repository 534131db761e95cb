"""The results as text for the screen, and as Markdown for pages."""

import collections
import itertools
import math
from collections.abc import Collection, Iterable

from benchmarks.accelerator.child import PARTS
from sparse_transformer import tables
from sparse_transformer.attention.verification import TOLERANCES


def failures(content: dict, parts: Iterable[str]) -> int:
  found = [content[part]["entries"] for part in parts if part in content]
  return sum("failed" in x for entries in found for x in entries.values())


def text(content: dict) -> str:
  lines = []
  for part, found in content.items():
    entries = found["entries"]
    rows = _rows(part, entries)
    lines += [f"{part} on {about(found['device'])}:", _count(entries)]
    lines += [tables.align(rows, 2)] if len(rows) > 1 else []
    lines += [*_troubles(entries), ""]
  return "\n".join(lines)


def page(contents: Iterable[dict], names: Collection[str] = PARTS) -> str:
  """What devices measured at full size in the named parts, as Markdown."""
  lines, parts = [], [x for content in contents for x in content.items()]
  groups: dict[tuple, list] = {}
  for part, found in sorted(parts, key=lambda x: [*PARTS].index(x[0])):
    if part in names and not found["device"]["small"]:
      groups.setdefault((part, found["device"]["name"]), []).append(found)
  for (part, _), many in groups.items():
    entries = {k: v for x in many for k, v in x["entries"].items()}
    places = dict.fromkeys(about(x["device"]) for x in many)
    if len(rows := _rows(part, entries)) > 1:
      lines += [f"`{part}` on {' and '.join(places)}:"]
      lines += [f"{_count(entries)}.", "", tables.markdown(rows), ""]
  return "\n".join(lines) or "Nothing has been run on an accelerator yet.\n"


def about(device: dict) -> str:
  jax = device["packages"]["jax"]
  text = "{number} x {name}, jax {jax}, Python {python}, commit {commit}"
  return text.format(**device, jax=jax)


def _count(entries):
  ran = [x for x in entries.values() if "skipped" not in x]
  passed = sum("failed" not in found for found in ran)
  return f"{passed} of {len(ran)} passed, {len(entries) - len(ran)} not run"


def _troubles(entries):
  for name, found in entries.items():
    if "failed" in found:
      yield f"  FAILED {name}: {found['failed']}"
  programs = (x.get("programs", {}).values() for x in entries.values())
  rows = itertools.chain(entries.values(), *programs)
  reasons = (x["skipped"] for x in rows if "skipped" in x)
  for reason, number in collections.Counter(reasons).items():
    yield f"  {number} not run: {reason}"


def _rows(part, entries):
  return [*TABLES[part](entries)] if part in TABLES else []


def _correctness(entries):
  """The largest errors, those of outputs and gradients by dtype."""
  worst: dict[str, dict[str, float]] = {}
  for found in entries.values():
    errors = worst.setdefault(found.get("executor", ""), {})
    for name, error in found.get("errors", {}).items():
      column = LSE if name == "lse" else found["dtype"]
      error = math.inf if error is None else error
      errors[column] = max(errors.get(column, 0), error)
  yield "executor", *TOLERANCES, LSE
  show = lambda x: "not finite" if x == math.inf else f"{x:.0e}" if x else ""
  for executor, errors in worst.items():
    if errors:
      yield executor, *(show(errors.get(x)) for x in (*TOLERANCES, LSE))


def _attention(entries):
  """Milliseconds, and TFLOP/s, of forward and backward passes."""
  cases: dict[tuple, dict] = {}
  for found in entries.values():
    if "programs" in found:
      case = found["n"], found["batch"], f"`{found['pattern']}`"
      cases.setdefault(case, {}).update(found["programs"])
  names = dict.fromkeys(itertools.chain(*cases.values()))
  yield "n", "batch", "pattern", *names
  for (n, *case), programs in sorted(cases.items()):
    cells = (programs.get(x, {}).get("forward_backward") for x in names)
    show = "{0:.3g} ({tflops:.0f})".format
    times = (x and show(1e3 * x["median"], **x) or "" for x in cells)
    yield f"{n:,}", *map(str, case), *times


def _presets(entries):
  yield "config", "remat", "batch", "ms", "tokens/s", "mfu", "GiB"
  for name, found in entries.items():
    if "step" in found:
      cells = name.partition(" ")[0], found["remat"], f"{found['batch']}"
      speed = f"{1e3 * found['step']['median']:.4g}"
      rate = f"{found['tokens_per_second']:,.0f}"
      mfu = f"{100 * found['mfu']:.1f} %" if "mfu" in found else ""
      yield *cells, speed, rate, mfu, f"{found['peak_bytes'] / 2**30:.3g}"


def _train(entries):
  yield "config", "step", "seconds", "bits/dim"
  for name, found in entries.items():
    curve = found.get("curve", [])
    for point in curve[:: max(1, len(curve) // 8)]:
      bits = f"{point['bits_per_dim']:.3f}"
      yield name, f"{point['step']:,}", f"{point['seconds']:.0f}", bits
    if "bits_per_dim" in found:
      bits = f"{found['bits_per_dim']:.4f}"
      yield f"{name}, validation", f"{found['step']:,}", "", bits


DENSE, LSE = "dense causal", "log-sum-exp"
TABLES = {
  table.__name__.removeprefix("_"): table
  for table in (_correctness, _attention, _presets, _train)
}
