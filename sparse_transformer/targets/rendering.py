"""Reports of compiled programs as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from sparse_transformer import tables

Report = dict[str, Any]
# XLA allocates this part of a GPU's memory unless told otherwise.
DEFAULT_FRACTION = 0.75


def render(report: Report) -> str:
  """The report as text."""
  title = (
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "Compiled for, not run on: these are properties of the program."
  )
  parts = [title]
  for program in report["programs"]:
    parts.append(f"{program['name']}\n{tables.align(_rows(program, report))}")
    if program.get("kernels"):
      parts[-1] += "\n" + tables.align(_kernels(program["kernels"]), 1)
  return "\n\n".join(parts)


def _rows(program: Report, report: Report) -> Iterator[Sequence[str]]:
  yield "  attention", f"by {program['executor']}"
  if not program["compiles"]:
    needs_more = program["fits"] is False
    verdict = "does not fit" if needs_more else "does not compile"
    yield f"  {verdict}", program["reason"]
    return
  seconds = program["trace_seconds"] + program["compile_seconds"]
  yield "  compiles", f"in {seconds:.0f} s"
  # TPUs run a program by themselves; nothing is launched from outside.
  is_tpu = report["device"].startswith("TPU")
  memory, room = program["memory"], report["memory"]
  text = f"{tables.size(memory['peak'])} of {tables.size(room)}: "
  text += "fits" if program["fits"] else "does not fit"
  is_default = is_tpu or memory["peak"] <= DEFAULT_FRACTION * room
  if program["fits"] and not is_default:
    text += ", with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
  yield "  peak memory", text
  yield "  arguments", tables.size(memory["arguments"])
  yield "  temporaries", tables.size(memory["temporaries"])
  text = f"{program['launches']:,} and {program['copies']:,} copies"
  if program["unknown_loops"]:
    text += f"; at least, {program['unknown_loops']} loops counted once"
  most = _most(program["most_launched"], "{:,}".format)
  yield "  operations" if is_tpu else "  launches", f"{text}; {most}"
  collectives = (
    f"{kind} {moved['count']:,} ({tables.size(moved['bytes'])})"
    for kind, moved in program["collectives"].items()
  )
  yield "  collectives", ", ".join(collectives) or "none"
  if "moved" in program:
    most = _most(program["most_moved"], tables.size)
    yield "  moves", f"{tables.size(program['moved'])}; {most}"


def _most(counts, number):
  """The first three of counts by name, which are the largest."""
  first = list(counts.items())[:3]
  return ", ".join(f"{name} {number(count)}" for name, count in first)


def _kernels(kernels):
  """A row for each hand-written kernel."""
  yield "  kernel", "registers", "spilled", "shared memory", "threads"
  for kernel in kernels:
    sizes = (
      tables.size(kernel["spilled_bytes"]),
      tables.size(kernel["shared_bytes"]),
    )
    name, registers = f"  {kernel['kernel']}", str(kernel["registers"])
    yield name, registers, *sizes, kernel["threads"]
