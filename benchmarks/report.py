"""Ratios and tables of measured times."""

import numpy as np

from sparse_transformer import tables

PASSES = "forward", "forward_backward"
# Matmul FLOPs per pair and unit of width: 2 products forward, 5 more backward.
FLOPS = {"forward": 4, "forward_backward": 14}
# Arrays of n x width, each read or written once: q, k, v, out in the forward
# pass; q, k, v, out, dout, dq, dk, dv in the backward pass. And float32 numbers
# per row: lse and delta are each written and read.
TENSORS = {"forward": 4, "forward_backward": 12}
ROW_FLOATS = {"forward": 1, "forward_backward": 4}
# Exponentials per pair: the backward pass recomputes them.
EXPS = {"forward": 1, "forward_backward": 2}
BYTES = {"float32": 4, "bfloat16": 2}
DENSE = "Causal()"


def limit(row, name, rates):
  """The least seconds that these rates allow for a pass over a row's pairs."""
  n, width, pairs = row["n"], row["width"], row["pairs"]
  size = TENSORS[name] * n * width * BYTES[row["dtype"]]
  times = (
    FLOPS[name] * width * pairs / rates["matmul"],
    (size + 4 * ROW_FLOATS[name] * n) / rates["copy"],
    EXPS[name] * pairs / rates["exp"],
  )
  return row["batch"] * row["heads"] * max(times)


def add_ratios(rows, rates):
  """Adds of_peak, speedup and ideal to the rows with times and pairs.

  of_peak: limit / measured time. speedup: time of the fastest dense causal
  program of the same size / measured time. ideal: causal pairs / pairs.
  """
  for row in rows:
    timed = [name for name in PASSES if name in row]
    if "pairs" not in row or not timed:
      continue
    rivals = [r for r in rows if r["pattern"] == DENSE and _alike(r, row)]
    row["of_peak"] = {
      name: limit(row, name, rates) / row[name]["median"] for name in timed
    }
    row["speedup"] = {
      name: min(times) / row[name]["median"]
      for name in timed
      if (times := [r[name]["median"] for r in rivals if name in r])
    }
    row["ideal"] = row["n"] * (row["n"] + 1) / 2 / row["pairs"]


def _alike(a, b):
  fields = "n", "batch", "heads", "width", "dtype"
  return all(a[field] == b[field] for field in fields)


def exponent(rows, name):
  """The power of n with which time grows: a least-squares fit of logs."""
  points = [(row["n"], row[name]["median"]) for row in rows if name in row]
  if len(points) < 2:
    return None
  return float(np.polyfit(*np.log(points).T, 1)[0])


def table(rows):
  """All rows as text; times as median (min-max)."""
  heads = (
    "program",
    "pattern",
    "n",
    "forward ms",
    "forward + backward ms",
    "of peak",
    "speed-up/ideal",
    "computed/needed",
    "peak MiB",
    "temp MiB",
    "error out, dq",
  )
  lines = [heads, *map(_cells, rows)]
  # Drop columns that are empty in all rows.
  used = [
    i
    for i in range(len(heads))
    if any(len(line) > i and line[i] not in ("", "-") for line in lines[1:])
  ]
  return tables.align(
    [[line[i] for i in used if i < len(line)] for line in lines]
  )


def _cells(row):
  name = "forward_backward" if "forward_backward" in row else "forward"
  cells = [row["program"], row["pattern"] or "own pattern", f"{row['n']:,}"]
  if "failed" in row:
    return *cells, row["failed"]
  return (
    *cells,
    *(_spread(row.get(name)) for name in PASSES),
    _number(row.get("of_peak", {}).get(name), "{:.2f}"),
    _number(row.get("speedup", {}).get(name), "{:.2f}/")
    + _number(row.get("ideal"), "{:.1f}"),
    _number(row.get("computed_per_pair"), "{:.2f}"),
    _mebibytes(row.get("peak_bytes")),
    _mebibytes(row.get("temp_bytes")),
    " ".join(f"{e:.0e}" for e in row.get("errors", [])),
  )


def summary(cases):
  """A summary of our rows: ratios of forward + backward times."""
  name = "forward_backward"
  lines = [("ours", "n", "of peak", "temp MiB", "times faster than")]
  notes = []
  for case, rows in ((case, cases[case]["rows"]) for case in cases):
    timed = [row for row in rows if name in row]
    for row in timed:
      if row["program"] == "ours":
        lines.append((*_facts(row, name), _rivals(row, timed, name)))
      if "process_bytes" in row:
        notes.append(
          f"n = {row['n']:,}: {row[name]['median']:.1f} s; the process used at"
          f" most {_mebibytes(row['process_bytes'])} MiB"
        )
    if case == "growth" and len(timed) > 1:
      powers = ", ".join(f"{p} n^{exponent(rows, p):.2f}" for p in PASSES)
      notes.append(f"growth of the time: {powers}")
    worst = [(e["program"], e["errors"][0]) for e in rows if "errors" in e]
    if case == "oracle":
      names = sorted({program for program, _ in worst})
      notes += [
        f"oracle: {p} differs from the reference by at most"
        f" {max(e for q, e in worst if q == p):.0e}"
        for p in names
      ]
  text = tables.align(lines) if lines[1:] else ""
  return "\n".join([text, *notes]).strip()


def _facts(row, name):
  of_peak, temp = row["of_peak"][name], _mebibytes(row.get("temp_bytes"))
  return row["pattern"], f"{row['n']:,}", f"{of_peak:.2f}", temp


def _rivals(row, rows, name):
  """How much slower other programs run this pattern, or all causal pairs."""
  times = {
    r["program"]: r[name]["median"] / row[name]["median"]
    for r in rows
    if r["program"] != "ours" and _alike(r, row)
    if r["pattern"] in (DENSE, row["pattern"])
  }
  return ", ".join(f"{program} {ratio:.2f}" for program, ratio in times.items())


def _spread(times):
  if times is None:
    return "-"
  median, low, high = (1e3 * times[x] for x in ("median", "min", "max"))
  return f"{median:.4g} ({low:.4g}-{high:.4g})"


def _number(value, form):
  return "" if value is None else form.format(value)


def _mebibytes(value):
  return _number(value and value / 2**20, "{:.0f}")
