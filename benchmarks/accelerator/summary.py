"""The results as text for the screen, and as Markdown for pages."""

import collections
import itertools
import math
from collections.abc import Collection, Iterable

from benchmarks.accelerator.child import PARTS
from sparse_transformer import tables
from sparse_transformer.attention.verification import NAMES


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
  lines = []
  for part, found in (x for content in contents for x in content.items()):
    if part in names and not found["device"]["small"]:
      rows = _rows(part, found["entries"])
      lines += [f"`{part}` on {about(found['device'])}:"]
      lines += [f"{_count(found['entries'])}.", ""]
      lines += [tables.markdown(rows), ""] if len(rows) > 1 else []
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
  worst: dict[tuple, dict] = {}
  for found in entries.values():
    if "errors" in found:
      errors = worst.setdefault((found["executor"], found["dtype"]), {})
      for name, error in found["errors"].items():
        error = math.inf if error is None else error
        errors[name] = max(errors.get(name, 0), error)
  yield "executor", "dtype", *(f"error of {name}" for name in NAMES)
  show = lambda x: "not finite" if x == math.inf else f"{x:.1e}"
  for key, errors in worst.items():
    yield *key, *(show(errors[name]) for name in NAMES)


def _attention(entries):
  """A row for each program, with its speed-up over dense attention."""
  passes = "forward ms", "TFLOP/s", "both ms", "TFLOP/s"
  yield "n", "batch", "pattern", "program", *passes, "x dense"
  dense: dict[tuple, float] = {}
  for found in entries.values():
    case = found.get("n"), found.get("batch"), found.get("pattern")
    for program, row in found.get("programs", {}).items():
      both = row.get("forward_backward", {})
      if program == DENSE and both:
        dense[case] = both["median"]
      if "forward" in row:
        known = both and case in dense
        ratio = f"{dense[case] / both['median']:.2f}" if known else ""
        cells = *_times(row["forward"]), *_times(both)
        yield *map(str, case), program, *cells, ratio


def _times(row):
  milliseconds = f"{1e3 * row['median']:.4g}" if row else ""
  return milliseconds, f"{row['tflops']:.3g}" if "tflops" in row else ""


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


DENSE = "dense causal"
TABLES = {
  table.__name__.removeprefix("_"): table
  for table in (_correctness, _attention, _presets, _train)
}
