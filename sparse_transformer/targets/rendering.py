"""Reports of compiled programs as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from sparse_transformer import tables

Report = dict[str, Any]
# XLA allocates this part of a GPU's memory unless told otherwise.
DEFAULT_FRACTION = 0.75


def render(report: Report) -> str:
  """The report as text."""
  programs = (_program(program, report) for program in report["programs"])
  return "\n\n".join([_title(report), *programs])


def _title(report):
  return (
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "Compiled for, not run on: these are properties of the program."
  )


def _program(program, report):
  table = tables.align(_rows(program, report))
  return f"{program['name']}\n{table}" + _kernels(program)


def _rows(program: Report, report: Report) -> Iterator[Sequence[str]]:
  yield "  attention", f"by {program['executor']}"
  if not program["compiles"]:
    needs_more = program["fits"] is False
    verdict = "does not fit" if needs_more else "does not compile"
    yield f"  {verdict}", program["reason"]
    return
  seconds = program["trace_seconds"] + program["compile_seconds"]
  yield "  compiles", f"in {seconds:.0f} s"
  memory = program["memory"]
  yield "  peak memory", f"{size(memory['peak'])}{_verdict(program, report)}"
  yield "  arguments", size(memory["arguments"])
  yield "  temporaries", size(memory["temporaries"])
  # TPUs run a program by themselves; nothing is launched from outside.
  name = "operations" if _is_tpu(report) else "launches"
  yield f"  {name}", _launches(program)
  yield "  collectives", _collectives(program)
  if moved := program.get("most_moved"):
    yield "  moves", _most(moved, size)


def _verdict(program, report):
  peak, memory = program["memory"]["peak"], report["memory"]
  if not program["fits"]:
    return f" of {size(memory)}: does not fit"
  text = f" of {size(memory)}: fits"
  if not _is_tpu(report) and peak > DEFAULT_FRACTION * memory:
    text += ", with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
  return text


def _is_tpu(report):
  return report["device"].startswith("TPU")


def _launches(program):
  text = f"{program['launches']:,} and {program['copies']:,} copies"
  if program["unknown_loops"]:
    text += f"; at least, {program['unknown_loops']} loops counted once"
  return f"{text}; {_most(program['most_launched'], '{:,}'.format)}"


def _most(counts, number):
  """The first three of counts by name, which are the largest."""
  first = list(counts.items())[:3]
  return ", ".join(f"{name} {number(count)}" for name, count in first)


def _collectives(program):
  return (
    ", ".join(
      f"{kind} {moved['count']:,} ({size(moved['bytes'])})"
      for kind, moved in program["collectives"].items()
    )
    or "none"
  )


def _kernels(program):
  """A table of the hand-written kernels."""
  if not program.get("kernels"):
    return ""
  rows = [("  kernel", "registers", "spilled", "shared memory", "threads")]
  for kernel in program["kernels"]:
    rows.append(
      (
        f"  {kernel['kernel']}",
        str(kernel["registers"]),
        size(kernel["spilled_bytes"]),
        size(kernel["shared_bytes"]),
        kernel["threads"],
      )
    )
  return "\n" + tables.align(rows, right_from=1)


def size(count: int) -> str:
  """Bytes in a suitable unit.

  >>> size(3 * 2**29), size(2**20), size(12)
  ('1.50 GiB', '1.00 MiB', '12 B')
  """
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if count >= unit:
      return f"{count / unit:,.2f} {name}"
  return f"{count} B"
