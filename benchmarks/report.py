"""Computes ratios and tables of measured times."""

import numpy as np

from sparse_transformer import tables

PASSES = "forward", "forward_backward"
# FLOPs of matrix products per pair and unit of width: there are 2 products in
# the forward pass and 5 more in the backward pass.
FLOPS = {"forward": 4, "forward_backward": 14}
DENSE = "Causal()"


def add_ratios(rows):
  """Adds `speedup` and `ideal` to rows that include times and pairs.

  `speedup` is the time of the fastest dense causal program of the same size,
  divided by the measured time. `ideal` is the number of causal pairs divided by
  the number of pairs.
  """
  for row in rows:
    timed = [name for name in PASSES if name in row]
    if "pairs" not in row or not timed:
      continue
    rivals = [r for r in rows if r["pattern"] == DENSE and _alike(r, row)]
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
  """Returns the power of n with which time grows, from a fit of logarithms."""
  points = [(row["n"], row[name]["median"]) for row in rows if name in row]
  if len(points) < 2:
    return None
  return float(np.polyfit(*np.log(points).T, 1)[0])


def table(rows):
  titles = "program", "pattern", "n", "forward ms", "forward + backward ms"
  titles += "speed-up/ideal", "computed/needed", "temp MiB", "errors"
  return tables.align([titles, *map(_cells, rows)])


def _cells(row):
  first = row["program"], row["pattern"], f"{row['n']:,}"
  if "failed" in row:
    return *first, row["failed"]
  name = next((x for x in reversed(PASSES) if x in row), "")
  speedup = row.get("speedup", {}).get(name)
  computed, size = row.get("computed_per_pair"), row.get("temp_bytes")
  return (
    *first,
    *(_spread(row[x]) if x in row else "" for x in PASSES),
    f"{speedup:.2f}/{row['ideal']:.1f}" if speedup else "",
    f"{computed:.2f}" if computed else "",
    f"{size / 2**20:.0f}" if size else "",
    " ".join(f"{error:.0e}" for error in row.get("errors", [])),
  )


def _spread(times):
  median, low, high = (1e3 * times[x] for x in ("median", "min", "max"))
  return f"{median:.4g} ({low:.4g}-{high:.4g})"
