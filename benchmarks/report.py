"""What follows from the times: ratios, tables."""

import numpy as np

PASSES = "forward", "forward_backward"
# Per pair and width, matmul FLOPs: 2 products forward, 5 more backward.
FLOPS = {"forward": 4, "forward_backward": 14}
# Tensors of n x width that are read or written once: q, k, v, out forward;
# q, k, v, out, dout, dq, dk, dv backward. And float32 numbers per row: lse is
# written, and read again with delta, which is written and read.
TENSORS = {"forward": 4, "forward_backward": 12}
ROW_FLOATS = {"forward": 1, "forward_backward": 4}
# Exponentials per pair: backward recomputes them.
EXPS = {"forward": 1, "forward_backward": 2}
BYTES = {"float32": 4, "bfloat16": 2}
DENSE = "Causal()"


def limit(row, name, rates):
  """Seconds below which this device cannot do a pass over the row's pairs."""
  n, width, pairs = row["n"], row["width"], row["pairs"]
  size = TENSORS[name] * n * width * BYTES[row["dtype"]]
  times = (
    FLOPS[name] * width * pairs / rates["matmul"],
    (size + 4 * ROW_FLOATS[name] * n) / rates["copy"],
    EXPS[name] * pairs / rates["exp"],
  )
  return row["batch"] * row["heads"] * max(times)


def add_ratios(rows, rates):
  """Adds roof, speedup and ideal to the rows that have times and pairs.

  roof: limit / measured. speedup: the best dense causal time of the same
  size / measured. ideal: causal pairs / pairs.
  """
  for row in rows:
    timed = [name for name in PASSES if name in row]
    if "pairs" not in row or not timed:
      continue
    rivals = [r for r in rows if r["pattern"] == DENSE and _alike(r, row)]
    row["roof"] = {
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
  """Of the time in n, by least squares in logarithms."""
  points = [(row["n"], row[name]["median"]) for row in rows if name in row]
  if len(points) < 2:
    return None
  return float(np.polyfit(*np.log(points).T, 1)[0])


def table(rows):
  """All rows, with the spread of the times."""
  heads = (
    "program",
    "pattern",
    "n",
    "forward ms",
    "forward + backward ms",
    "roof",
    "speed-up/ideal",
    "waste",
    "peak MiB",
    "temp MiB",
    "error out, dq",
  )
  lines = [heads, *map(_cells, rows)]
  # Without the columns of which nobody has anything.
  used = [
    i
    for i in range(len(heads))
    if any(len(line) > i and line[i] not in ("", "-") for line in lines[1:])
  ]
  return _align([[line[i] for i in used if i < len(line)] for line in lines])


def _cells(row):
  name = "forward_backward" if "forward_backward" in row else "forward"
  cells = [row["program"], row["pattern"] or "its own", f"{row['n']:,}"]
  if "failed" in row:
    return *cells, row["failed"]
  return (
    *cells,
    *(_spread(row.get(name)) for name in PASSES),
    _number(row.get("roof", {}).get(name), "{:.2f}"),
    _number(row.get("speedup", {}).get(name), "{:.2f}/")
    + _number(row.get("ideal"), "{:.1f}"),
    _number(row.get("waste"), "{:.2f}"),
    _mebibytes(row.get("peak_bytes")),
    _mebibytes(row.get("temp_bytes")),
    " ".join(f"{e:.0e}" for e in row.get("errors", [])),
  )


def summary(cases):
  """What the tables say of ours, in ratios of forward + backward times."""
  name = "forward_backward"
  lines = [("ours", "n", "roof", "temp MiB", "faster than, times")]
  notes = []
  for case, rows in ((case, cases[case]["rows"]) for case in cases):
    timed = [row for row in rows if name in row]
    for row in timed:
      if row["program"] == "ours":
        lines.append((*_facts(row, name), _rivals(row, timed, name)))
      if "process_bytes" in row:
        notes.append(
          f"n = {row['n']:,}: {row[name]['median']:.1f} s, whole process at"
          f" most {_mebibytes(row['process_bytes'])} MiB"
        )
    if case == "growth" and len(timed) > 1:
      powers = ", ".join(f"{p}: {exponent(rows, p):.2f}" for p in PASSES)
      notes.append(f"exponent of the time in n, {powers}")
    worst = [(e["program"], e["errors"][0]) for e in rows if "errors" in e]
    if case == "oracle":
      names = sorted({program for program, _ in worst})
      notes += [
        f"oracle: {p} differs from the reference by"
        f" {max(e for q, e in worst if q == p):.0e} at most"
        for p in names
      ]
  return "\n".join([_align(lines) if lines[1:] else "", *notes]).strip()


def _facts(row, name):
  roof, temp = row["roof"][name], _mebibytes(row.get("temp_bytes"))
  return row["pattern"], f"{row['n']:,}", f"{roof:.2f}", temp


def _rivals(row, rows, name):
  """How much slower the other programs are that do as much or more."""
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


def _align(lines):
  """Columns as wide as their cells; the last cell of a line may be long."""
  widths = {}
  for line in lines:
    for i, cell in enumerate(line[:-1]):
      widths[i] = max(widths.get(i, 0), len(cell))
  return "\n".join(
    "  ".join(
      cell.ljust(widths.get(i, 0)) for i, cell in enumerate(line)
    ).rstrip()
    for line in lines
  )
