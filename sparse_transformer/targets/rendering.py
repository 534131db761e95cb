"""Reports of compiled programs as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from sparse_transformer import tables

Report = dict[str, Any]
DEFAULT_FRACTION = 0.75  # of a GPU's memory is what XLA allocates by default


def render(report: Report) -> str:
  """The report as text."""
  title = (
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "Compiled for, not run on: these are properties of the program."
  )
  found = (
    f"{program['name']}\n{tables.align(_rows(program, report))}"
    for program in report["programs"]
  )
  return "\n\n".join([title, *found])


def _rows(program: Report, report: Report) -> Iterator[Sequence[str]]:
  yield "  attention", f"by {program['executor']}"
  if not program["compiles"]:
    verb = "fit" if program["fits"] is False else "compile"
    yield f"  does not {verb}", program["reason"]
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
  first = program["most_launched"].items()
  most = ", ".join(f"{name} {count:,}" for name, count in first)
  yield "  operations" if is_tpu else "  launches", f"{text}; {most}"
  collectives = (
    f"{kind} {moved['count']:,} ({tables.size(moved['bytes'])})"
    for kind, moved in program["collectives"].items()
  )
  yield "  collectives", ", ".join(collectives) or "none"
