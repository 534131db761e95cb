"""Formats results as text for the terminal, and as Markdown for pages."""

import collections
import itertools
import math
from collections.abc import Iterable, Sequence

from benchmarks.accelerator.child import PARTS
from sparse_transformer import tables
from sparse_transformer.attention.verification import TOLERANCES


def failures(content: dict, parts: Iterable[str]) -> int:
  found = [content[part]["entries"] for part in parts if part in content]
  return sum("failed" in x for entries in found for x in entries.values())


def text(content: dict) -> str:
  lines = []
  for part, found in content.items():
    entries = [*found["entries"].items()]
    rows = _rows(part, entries)
    lines += [f"{part} on {about(found['device'])}:", _count(entries)]
    lines += [tables.align(rows, 2)] if len(rows) > 1 else []
    lines += [*_troubles(entries), ""]
  return "\n".join(lines)


def page(contents: Sequence[dict]) -> str:
  """Returns full-size results and failures of all devices, as Markdown."""
  groups: dict[tuple, list] = {}
  for part, content in itertools.product(PARTS, contents):
    if part in content and not content[part]["device"]["small"]:
      place = about(content[part]["device"] | {"commit": ""})
      groups.setdefault((part, place), []).append(content[part])
  lines = []
  for (part, place), many in groups.items():
    entries = [x for found in many for x in found["entries"].items()]
    rows, failed = _rows(part, entries), any("failed" in x for _, x in entries)
    if len(rows) > 1 or failed:
      commits = dict.fromkeys(str(x["device"]["commit"]) for x in many)
      lines += [f"`{part}` on {place}{' and '.join(commits)}:"]
      lines += [f"{_count(entries)}.", ""]
      lines += [tables.markdown(rows)] if len(rows) > 1 else []
  return "\n".join(lines) or "Nothing has been run on an accelerator yet.\n"


def about(device: dict) -> str:
  jax = device["packages"]["jax"]
  text = "{number} x {name}, jax {jax}, Python {python}, commit {commit}"
  return text.format(**device, jax=jax)


def _count(entries):
  ran = [x for _, x in entries if "skipped" not in x]
  passed = sum("failed" not in found for found in ran)
  return f"{passed} of {len(ran)} passed, {len(entries) - len(ran)} not run"


def _troubles(entries):
  for name, found in entries:
    if "failed" in found:
      yield f"  FAILED {name}: {found['failed']}"
  every = [x for _, x in entries]
  programs = (x.get("programs", {}).values() for x in every)
  rows = itertools.chain(every, *programs)
  reasons = (x["skipped"] for x in rows if "skipped" in x)
  for reason, number in collections.Counter(reasons).items():
    yield f"  {number} not run: {reason}"


def _rows(part, entries):
  return [*TABLES[part](entries)] if part in TABLES else []


def _correctness(entries):
  """Yields rows of the largest errors: by dtype, and that of log-sum-exp."""
  worst: dict[str, dict[str, float]] = {}
  for _, found in entries:
    for name, error in found.get("errors", {}).items():
      errors = worst.setdefault(found["backend"], {})
      column = LSE if name == "lse" else found["dtype"]
      error = math.inf if error is None else error
      errors[column] = max(errors.get(column, 0), error)
  columns = *TOLERANCES, LSE
  yield "backend", *columns
  show = lambda x: "not finite" if x == math.inf else f"{x:.0e}"
  for backend, errors in worst.items():
    yield backend, *(show(errors[x]) if x in errors else "" for x in columns)


def _attention(entries):
  """Yields rows of milliseconds and TFLOP/s of forward and backward passes."""
  cases: dict[tuple, dict] = {}
  for _, found in entries:
    if "programs" in found:
      case = found["n"], found["batch"], f"`{found['pattern']}`"
      cases.setdefault(case, {}).update(found["programs"])
  names = dict.fromkeys(itertools.chain(*cases.values()))
  yield "n", "batch", "pattern", *names
  show = lambda x: f"{1e3 * x['median']:,.2f} ({x['tflops']:.0f})"
  for (n, *case), programs in sorted(cases.items()):
    times = (programs.get(x, {}).get("forward_backward") for x in names)
    yield f"{n:,}", *map(str, case), *(show(x) if x else "" for x in times)


def _presets(entries):
  yield "config", "remat", "batch", "ms", "tokens/s", "MFU", "GiB"
  for name, found in entries:
    if "step" in found:
      cells = name.partition(" ")[0], found["remat"], f"{found['batch']}"
      speed = f"{1e3 * found['step']['median']:.4g}"
      rate = f"{found['tokens_per_second']:,.0f}"
      mfu = f"{100 * found['mfu']:.1f} %" if "mfu" in found else ""
      yield *cells, speed, rate, mfu, f"{found['peak_bytes'] / 2**30:.3g}"


def _profile(entries):
  """Yields the milliseconds of a step and of its parts of the network."""
  rows = [(name, x) for name, x in entries if "parts" in x]
  names = rows[0][1]["parts"] if rows else ()
  yield "config", "remat", "step", *names, "launches", "idle"
  for name, found in rows:
    cells = name.partition(" ")[0], found["remat"]
    parts = found["parts"].values()
    times = 1e3 * found["step"]["median"], *(x["ms"] for x in parts)
    launches = f"{sum(x['launches'] for x in parts):,.0f}"
    idle = f"{100 * found['idle']:.1f} %"
    yield *cells, *(f"{x:.4g}" for x in times), launches, idle


def _variants(entries):
  """Yields rows of `_presets`, with the speed relative to the base."""
  found = {name: x for name, x in entries if "step" in x}
  titles, *rows = _presets(found.items())
  yield *titles, "of base", "change"
  speed = lambda name: found.get(name, {}).get("tokens_per_second", math.nan)
  for name, row in zip(found, rows, strict=True):
    share = speed(name) / speed(found[name]["base"])
    yield *row, f"{share:.3f}", found[name]["change"]


def _train(entries):
  yield "config", "step", "seconds", "bits/dim"
  for name, found in entries:
    curve = found.get("curve", [])
    for point in curve[:: max(1, len(curve) // 8)]:
      bits = f"{point['bits_per_dim']:.3f}"
      yield name, f"{point['step']:,}", f"{point['seconds']:.0f}", bits
    if "bits_per_dim" in found:
      bits = f"{found['bits_per_dim']:.4f}"
      yield f"{name}, validation", f"{found['step']:,}", "", bits


RIVAL, LSE = "dense causal", "log-sum-exp"
TABLES = {
  table.__name__.removeprefix("_"): table
  for table in (
    *(_profile, _presets, _attention, _variants, _correctness, _train),
  )
}
