"""The memory traffic of training steps on a GPU, by part of the network.

  python -m benchmarks.traffic

Compiles the training steps of some presets for an absent GPU, and counts their
launches, bytes and FLOPs of matrix products. --only=TEXT selects the presets
whose names contain the text. Nothing is executed, because all counts follow
from the compiled program. The effect of a change can therefore be seen without
a GPU.

Each kernel is assumed to read its operands once and to write its results once.
If a fusion only slices an operand, it reads the slice. Caches are ignored, so
bytes are an upper bound. A fusion that contains a matrix product or an
attention kernel belongs to that part, and other fusions belong to the part of
their result.
"""

import math
import os
import pathlib
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple
from unittest import mock

from benchmarks import compiled, record
from sparse_transformer import tables, version
from sparse_transformer.targets import compilers, hardware, hlo

TARGET = "h200"
PRESETS = "enwik8", "cifar10", "cifar10_15m"
# Scopes of the network's code. A launch belongs to the first that matches.
SCOPES = "dropout", "norm", "activation", "residual", "linear"
ATTENTION = re.compile(r"pallas_call|__cudnn")
PRODUCTS, OTHER, OUTSIDE = "products", "other layers", "outside of layers"
PARTS = ("attention", PRODUCTS, *SCOPES, OTHER, OUTSIDE)
# Opcodes that read or write a slice of their first operand.
SLICES = {"dynamic-slice", "slice", "gather"}
UPDATE = "dynamic-update-slice"
SAME = {"bitcast", "reshape"}
MOST = 1.05  # the largest accepted ratio of a step's cost to its record


class Cost(NamedTuple):
  launches: int
  bytes: float
  flops: float


def by_part(text: str) -> dict[str, Cost]:
  """Returns the cost of one execution of a compiled step: {part: cost}.

  Args:
    text: an optimized HLO module, as `compiled.as_text()` gives it.
  """
  found: dict[str, Cost] = {}
  for _, part, cost in costs(text):
    old = found.get(part, Cost(0, 0, 0))
    found[part] = Cost(
      launches=old.launches + cost.launches,
      bytes=old.bytes + cost.bytes,
      flops=old.flops + cost.flops,
    )
  return {part: found[part] for part in PARTS if part in found}


def costs(text: str) -> Iterator[tuple[str, str, Cost]]:
  """Yields (name, part, cost) of the instructions of a compiled step.

  Args:
    text: an optimized HLO module, as `compiled.as_text()` gives it.
  """
  module, entry = hlo.read_module(text)
  for executed in hlo.execute(module, entry):
    x = executed.instruction
    kind = hlo.kind_of(x)
    if not kind or x.opcode == "while":
      continue
    part, moved, flops = _cost(module, executed)
    cost = Cost(
      launches=executed.times * (kind == hlo.LAUNCH),
      bytes=executed.times * moved,
      flops=executed.times * flops,
    )
    yield x.name, part, cost


def _cost(module, executed):
  """Returns (part, bytes, FLOPs of products) of one execution."""
  x, _, shapes, is_in_layers = executed
  if x.opcode in ("fusion", "fusion-start"):
    (called,) = x.computations("calls")
    body = module[called]
    moved = _moved_by_fusion(body)
  else:
    body = [x]
    operands = [_shape(shapes, y) for y in x.operands()]
    moved = hlo.num_bytes(x.shape) + sum(map(hlo.num_bytes, operands))
    if x.opcode in SLICES:
      moved = 2 * hlo.num_bytes(x.shape)
    if x.opcode == UPDATE:
      moved = 2 * hlo.num_bytes(operands[1])
  flops = sum(_flops(module, body, shapes))

  # Search only the attributes, because operands are named after kernels, too.
  _, _, attributes = x.rest.partition(")")
  is_kernel = x.opcode == "custom-call" and ATTENTION.search(attributes)
  if is_kernel and "norm_" not in attributes:
    part = "attention"
  elif flops:
    part = PRODUCTS
  elif not is_in_layers:
    part = OUTSIDE
  else:
    name = re.search(r'op_name="([^"]*)"', x.rest)
    scopes = name[1].split("/") if name else []
    part = next((y for y in SCOPES if y in scopes), OTHER)
  return part, moved, flops


def _shape(shapes, operand):
  """Returns the shape of an operand, or of an array of a tuple: "state#1"."""
  name, _, index = operand.partition("#")
  shape = shapes[name]
  if index:
    arrays = [found[0] for found in hlo.ARRAY.finditer(shape)]
    return arrays[int(index)]
  return shape


def _moved_by_fusion(body):
  """Returns the bytes that a fusion reads and writes."""
  by_name = {x.name: x for x in body}
  users: dict[str, list[tuple[hlo.Instruction, int]]] = {}
  for x in body:
    for place, operand in enumerate(x.operands()):
      users.setdefault(operand, []).append((x, place))

  def read(x):
    """Returns the bytes of an array that its users need."""
    size = hlo.num_bytes(x.shape)
    total = 0
    for user, place in users.get(x.name, ()):
      if user.opcode in SLICES and place == 0:
        total += hlo.num_bytes(user.shape)
      elif user.opcode in SAME:
        total += read(user)
      elif user.opcode != UPDATE or place != 0:
        return size
    return min(total, size)

  def written(x):
    """Returns the bytes that are written for a result."""
    operands = [by_name[y] for y in x.operands() if y in by_name]
    if x.opcode == "tuple":
      return sum(map(written, operands))
    if x.opcode == UPDATE:
      return hlo.num_bytes(operands[1].shape)
    if x.opcode in (*SAME, "convert", "copy") and operands:
      if operands[0].opcode == UPDATE:
        return written(operands[0])
    return hlo.num_bytes(x.shape)

  # The root of a computation is its last line.
  inputs = (x for x in body if x.opcode == "parameter")
  return sum(map(read, inputs)) + written(body[-1])


def _flops(module, body, shapes) -> Iterator[float]:
  """Yields the FLOPs of each matrix product."""
  shapes = shapes | {x.name: x.shape for x in body}
  for x in body:
    if x.opcode == "fusion":
      (called,) = x.computations("calls")
      yield from _flops(module, module[called], {})
      continue

    contracted = re.search(
      r'lhs_contracting_dim(?:ension)?s(?:=\{|":\["?)([\d,]*)', x.rest
    )
    is_call = x.opcode == "custom-call" and "gemm" in x.rest
    if contracted and (x.opcode == "dot" or is_call):
      left = _sizes(_shape(shapes, x.operands()[0]))
      axes = [int(axis) for axis in contracted[1].split(",") if axis]
      depth = math.prod(left[axis] for axis in axes)
      yield 2 * math.prod(_sizes(x.shape)) * depth


def _sizes(shape):
  """Returns the sizes of the first array of a shape."""
  _, sizes = hlo.ARRAY.findall(shape)[0]
  return [int(size) for size in sizes.split(",") if size]


def measure(preset: str) -> dict:
  """Compiles the training step of a preset, and returns its cost."""
  with tempfile.TemporaryDirectory() as folder:
    flags = dict(XLA_FLAGS=f"--xla_dump_to={folder}")
    with mock.patch.dict(os.environ, flags):
      report = compilers.compile_for(
        hardware.parse(TARGET), compiled.config_of(preset)
      )
    paths = pathlib.Path(folder).glob("*after_optimizations.txt")
    # With model.remat=auto, several steps are compiled. The last is the choice.
    steps = sorted(path for path in paths if "train_step" in path.name)
    parts = by_part(steps[-1].read_text())
  (program,) = report["programs"]
  return dict(
    preset=preset,
    target=TARGET,
    jax=report["jax"],
    remat=report["remat"],
    peak_bytes=program["memory"]["peak"],
    parts={part: cost._asdict() for part, cost in parts.items()},
  )


def totals(entry: Mapping) -> Cost:
  """Returns the cost of a whole step."""
  found = [Cost(**cost) for cost in entry["parts"].values()]
  return Cost(*map(sum, zip(*found, strict=True)))


def growth(new: Mapping, old: Mapping) -> Iterator[str]:
  """Yields a phrase for each cost that exceeds `MOST` times its record."""
  peaks = new["peak_bytes"], old["peak_bytes"]
  if peaks[0] > MOST * peaks[1]:
    yield _grown(new, "peak memory in bytes", *peaks)

  for kind in "bytes", "launches":
    amounts = [getattr(totals(x), kind) for x in (new, old)]
    if amounts[0] > MOST * amounts[1]:
      more = {
        part: cost[kind] - old["parts"].get(part, {}).get(kind, 0)
        for part, cost in new["parts"].items()
      }
      worst = max(more, key=more.__getitem__)
      text = _grown(new, kind, *amounts)
      yield f"{text}; most of it in {worst}: {more[worst]:+,.0f}"


def _grown(entry, kind, new, old):
  return (
    f"{entry['preset']}: {kind} grew from {old:,.0f} to {new:,.0f}"
    " (to accept this, run python -m benchmarks.traffic)"
  )


def table(entries: Iterable[Mapping]) -> str:
  rows = [("preset", "part", "launches", "GB", "TFLOP of products")]
  for entry in entries:
    name = f"`{entry['preset']}`"
    for part, cost in entry["parts"].items():
      rows.append((name, part, *_cells(Cost(**cost))))
      name = ""
    peak = tables.size(entry["peak_bytes"])
    about = f"all; `remat={entry['remat']}`, peak memory {peak}"
    rows.append((name, about, *_cells(totals(entry))))
  return tables.markdown(rows)


def _cells(cost):
  flops = f"{cost.flops / 1e12:,.1f}" if cost.flops else ""
  return f"{cost.launches:,}", f"{cost.bytes / 1e9:,.1f}", flops


def main() -> None:
  flags = record.parser(__doc__)
  flags.add_argument("--only", default="", help="presets with this text")
  only = flags.parse_args().only
  path = record.path("traffic")
  rows = record.read("traffic") if path.exists() else []
  found = {x["preset"]: x for x in rows}
  # The first record that is written changes the working tree.
  commit = version.commit()
  for preset in PRESETS:
    if only in preset:
      found[preset] = measure(preset) | dict(commit=commit)
      record.write(path, [found[x] for x in PRESETS if x in found])
  print(table(found.values()))


if __name__ == "__main__":
  main()
