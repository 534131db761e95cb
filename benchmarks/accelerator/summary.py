"""The results as text for the screen."""

from collections.abc import Iterable

from benchmarks.accelerator.parts import PARTS
from sparse_transformer import tables


def failures(content: dict, parts: Iterable[str]) -> int:
  """How many entries of these parts failed."""
  return sum(len(_with(content, part, "failed")) for part in parts)


def text(content: dict) -> str:
  """All parts, in their order."""
  device = content["device"]
  lines = [
    "{number} x {name}, jax {jax}, Python {python}, commit {commit}".format(
      **device
    )
  ]
  for part in PARTS:
    if part in content["parts"]:
      entries = content["parts"][part]["entries"]
      lines += ["", part, *SECTIONS[part](entries), *_troubles(entries)]
  return "\n".join(lines)


def _setup(entries):
  for name, found in entries.items():
    if "auto" in found:
      others = ", ".join(f"{x}: {y}" for x, y in found["executors"].items())
      yield f"  {name}: auto is {found['auto']} ({others})"


def _checks(entries):
  ran = [x for x in entries.values() if "skipped" not in x]
  passed = sum("failed" not in found for found in ran)
  yield f"  {passed} of {len(ran)} passed, {len(entries) - len(ran)} not run"


def _correctness(entries):
  yield from _checks(entries)
  worst: dict[tuple, dict] = {}
  for found in entries.values():
    if "errors" in found:
      errors = worst.setdefault((found["dtype"], found["executor"]), {})
      for name, error in found["errors"].items():
        known = errors.get(name, 0)
        is_worse = error is None or (known is not None and error > known)
        errors[name] = error if is_worse else known
  if worst:
    show = lambda error: "not finite" if error is None else f"{error:.1e}"
    names = next(iter(worst.values()))
    rows = [("largest error", "", *names)]
    rows += [
      (*key, *map(show, errors.values())) for key, errors in worst.items()
    ]
    yield tables.align(rows, 2)


def _attention(entries):
  rows = [
    ("", "program", "forward ms", "TFLOP/s", "both ms", "TFLOP/s", "x dense")
  ]
  for name, found in entries.items():
    for program, row in found.get("programs", {}).items():
      if "forward" in row or "forward_backward" in row:
        both = row.get("forward_backward", {})
        cells = *_times(row.get("forward", {})), *_times(both)
        ratio = f"{both['speedup']:.2f}" if "speedup" in both else "-"
        rows.append((name, program, *cells, ratio))
      if "failed" in row:
        rows.append((name, program, row["failed"]))
  yield tables.align(rows, 2)


def _times(row):
  milliseconds = f"{1e3 * row['median']:.4g}" if row else "-"
  return milliseconds, f"{row['tflops']:.3g}" if "tflops" in row else "-"


def _presets(entries):
  rows = [("config", "remat", "batch", "ms", "tokens/s", "mfu", "GiB")]
  for name, found in entries.items():
    if "step" in found:
      size = found["peak_bytes"] or found["compiled_bytes"]
      mfu = f"{100 * found['mfu']:.1f} %" if "mfu" in found else "-"
      rows.append(
        (
          name.partition(",")[0],
          found["remat"],
          f"{found['batch']}",
          f"{1e3 * found['step']['median']:.4g}",
          f"{found['tokens_per_second']:,.0f}",
          mfu,
          f"{size / 2**30:.3g}",
        )
      )
  yield tables.align(rows, 2)


def _train(entries):
  for name, found in entries.items():
    if curve := found.get("curve"):
      shown = curve[:: max(1, len(curve) // 8)]
      bits = ", ".join(f"{p['step']}: {p['bits_per_dim']:.3f}" for p in shown)
      yield f"  {name}, training bits/dim by step: {bits}"
    if "bits_per_dim" in found:
      bits, error = found["bits_per_dim"], found["standard_error"]
      yield f"  {name}: {bits:.4f} +- {error:.4f} bits/dim on validation images"


SECTIONS = {
  "setup": _setup,
  "correctness": _correctness,
  "determinism": _checks,
  "resume": _checks,
  "attention": _attention,
  "presets": _presets,
  "train": _train,
}


def _troubles(entries):
  """A line for each failure, and one for each reason to skip."""
  for name, found in entries.items():
    if "failed" in found:
      yield f"  FAILED {name}: {found['failed']}"
  reasons: dict[str, int] = {}
  for found in entries.values():
    if "skipped" in found:
      reasons[found["skipped"]] = reasons.get(found["skipped"], 0) + 1
  for reason, number in reasons.items():
    yield f"  {number} not run: {reason}"


def _with(content, part, key):
  entries = content["parts"].get(part, {"entries": {}})["entries"]
  return [name for name, found in entries.items() if key in found]
