"""The results as text for the screen, and as Markdown for pages."""

from collections.abc import Collection, Iterable

from benchmarks.accelerator.parts import DENSE, PARTS
from sparse_transformer import tables


def failures(content: dict, parts: Iterable[str]) -> int:
  """How many entries of these parts failed."""
  return sum(len(_with(content, part, "failed")) for part in parts)


def text(content: dict) -> str:
  """All parts, in their order."""
  lines = [about(content)]
  for part in PARTS:
    if part in content["parts"]:
      entries = content["parts"][part]["entries"]
      rows = ROWS[part](entries)
      lines += ["", f"{part}: {_count(entries)}"]
      lines += [tables.align(rows, 2)] if len(rows) > 1 else []
      lines += _troubles(entries)
  return "\n".join(lines)


def page(contents: Iterable[dict], names: Collection[str] = PARTS) -> str:
  """What devices measured at full size, as Markdown.

  Args:
    contents: results of devices.
    names: the parts to show.
  """
  lines = []
  for content in contents:
    parts = {
      name: found
      for name, found in content["parts"].items()
      if name in names and not found["small"]
    }
    lines += [f"**{about(content)}**", ""] if parts else []
    for part, found in parts.items():
      rows = ROWS[part](found["entries"])
      lines += [f"`{part}`: {_count(found['entries'])}.", ""]
      lines += [tables.markdown(rows), ""] if len(rows) > 1 else []
  return "\n".join(lines) or "Nothing has been run on an accelerator yet.\n"


def about(content: dict) -> str:
  """The device, the versions and the commit."""
  return (
    "{number} x {name}, jax {jax}, Python {python}, commit {commit}".format(
      **content["device"]
    )
  )


def _count(entries):
  """How many entries passed."""
  ran = [x for x in entries.values() if "skipped" not in x]
  passed = sum("failed" not in found for found in ran)
  return f"{passed} of {len(ran)} passed, {len(entries) - len(ran)} not run"


# The rows of a part, of which the first is the head of a table.


def _setup(entries):
  rows = [("", "auto", "others")]
  for name, found in entries.items():
    if "auto" in found:
      others = ", ".join(f"{x}: {y}" for x, y in found["executors"].items())
      rows.append((name, found["auto"], others))
  return rows


def _checks(entries):
  del entries
  return []


def _correctness(entries):
  worst: dict[tuple, dict] = {}
  for found in entries.values():
    if "errors" in found:
      errors = worst.setdefault((found["executor"], found["dtype"]), {})
      for name, error in found["errors"].items():
        known = errors.get(name, 0)
        is_worse = error is None or (known is not None and error > known)
        errors[name] = error if is_worse else known
  show = lambda error: "not finite" if error is None else f"{error:.1e}"
  names = list(dict.fromkeys(x for errors in worst.values() for x in errors))
  rows = [("executor", "dtype", *(f"error of {name}" for name in names))]
  for key, errors in worst.items():
    rows.append(
      (*key, *(show(errors[x]) if x in errors else "" for x in names))
    )
  return rows


def _attention(entries):
  """A row for each program, with its speed-up over dense attention."""
  rows = [
    ("", "program", "forward ms", "TFLOP/s", "both ms", "TFLOP/s", "x dense")
  ]
  titles: dict[tuple, str] = {}  # of the first entry of a case
  dense: dict[tuple, float] = {}
  for name, found in entries.items():
    case = found.get("n"), found.get("batch"), *found.get("patterns", [])
    for program, row in found.get("programs", {}).items():
      titles.setdefault(case, name)
      both = row.get("forward_backward", {})
      if program == DENSE and both:
        dense[case] = both["median"]
      if "forward" in row or both:
        ratio = (
          f"{dense[case] / both['median']:.2f}"
          if both and case in dense
          else ""
        )
        cells = *_times(row.get("forward", {})), *_times(both)
        rows.append((titles[case], program, *cells, ratio))
      if "failed" in row:
        rows.append((titles[case], program, row["failed"]))
  return rows


def _times(row):
  milliseconds = f"{1e3 * row['median']:.4g}" if row else ""
  return milliseconds, f"{row['tflops']:.3g}" if "tflops" in row else ""


def _presets(entries):
  rows = [("config", "remat", "batch", "ms", "tokens/s", "mfu", "GiB")]
  for name, found in entries.items():
    if "step" in found:
      size = found["peak_bytes"] or found["compiled_bytes"]
      mfu = f"{100 * found['mfu']:.1f} %" if "mfu" in found else ""
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
  return rows


def _train(entries):
  """Points of the curve, and the result."""
  rows = [("config", "step", "seconds", "bits/dim")]
  for name, found in entries.items():
    curve = found.get("curve", [])
    for point in curve[:: max(1, len(curve) // 8)]:
      bits = f"{point['bits_per_dim']:.3f}"
      rows.append((name, f"{point['step']:,}", f"{point['seconds']:.0f}", bits))
    if "bits_per_dim" in found:
      bits = "{bits_per_dim:.4f} ± {standard_error:.4f}".format(**found)
      rows.append((f"{name}, validation", f"{found['steps']:,}", "", bits))
  return rows


ROWS = {
  "setup": _setup,
  "correctness": _correctness,
  "attention": _attention,
  "presets": _presets,
  "train": _train,
  "determinism": _checks,
  "resume": _checks,
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
