"""Reports of compiled programs as text."""

from collections.abc import Iterator, Sequence
from typing import Any

from sparse_transformer import tables

Report = dict[str, Any]
# XLA allocates this part of a GPU's memory unless told otherwise.
DEFAULT_FRACTION = 0.75


def render(report: Report) -> str:
  """The report as text, its advice at the end."""
  parts = [_title(report)]
  parts += [_program(program, report) for program in report["programs"]]
  if advice := report.get("advice"):
    parts.append("\n".join(_advice(advice, report)))
  return "\n\n".join(parts)


def _title(report):
  return (
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "Compiled for, not run on: launches and memory are those of the program;"
    " modelled\ntime ranks programs, and does not predict how long they take."
  )


def _program(program, report):
  table = tables.align(_rows(program, report))
  return f"{program['name']}\n{table}" + _kernels(program)


def _rows(program: Report, report: Report) -> Iterator[Sequence[str]]:
  yield "  attention", f"by {program['executor']}"
  if not program["compiles"]:
    yield (
      "  does not fit" if needed_more(program) else "  does not compile",
      (program["reason"]),
    )
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
  yield "  modelled", _modelled(program)


def needed_more(program: Report) -> bool:
  """Whether a program did not compile since the memory is too small."""
  return program["fits"] is False


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
  most = list(program["most_launched"].items())[:3]
  text = f"{program['launches']:,} and {program['copies']:,} copies"
  if program["unknown_loops"]:
    text += f"; at least, {program['unknown_loops']} loops counted once"
  return f"{text}; {', '.join(f'{name} {count:,}' for name, count in most)}"


def _collectives(program):
  return (
    ", ".join(
      f"{kind} {moved['count']:,} ({size(moved['bytes'])})"
      for kind, moved in program["collectives"].items()
    )
    or "none"
  )


def _modelled(program):
  modelled = program["modelled"]
  if modelled is None:
    return "the compiler has no model of this device"
  text = modelled_time(modelled)
  if without := modelled["without"]:
    text += f", without {without:,} that it has no model of"
  return text


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


def _advice(advice: Report, report: Report) -> Iterator[str]:
  for attempt in advice["tried"]:
    yield f"{_changes(attempt, report)}: {_outcome(attempt)}"
  if not advice["found"]:
    yield "nothing that was tried fits"


def _changes(attempt, report):
  changes = [f"--config.{k}={v}" for k, v in attempt["changes"].items()]
  if attempt["target"] != report["target"]:
    changes.append(f"--target={attempt['target']}")
  return "with " + " ".join(changes)


def _outcome(attempt):
  for program in attempt["programs"]:
    if not program["compiles"]:
      return f"does not compile: {program['reason']}"
  largest = max(attempt["programs"], key=lambda x: x["memory"]["peak"])
  return size(largest["memory"]["peak"]) + _verdict(largest, attempt)


def size(count: int) -> str:
  """Bytes in a suitable unit.

  >>> size(3 * 2**29), size(2**20), size(12)
  ('1.50 GiB', '1.00 MiB', '12 B')
  """
  for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
    if count >= unit:
      return f"{count / unit:,.2f} {name}"
  return f"{count} B"


def modelled_time(modelled: dict[str, Any]) -> str:
  """The compiler's estimate, in milliseconds or cycles.

  >>> modelled_time(dict(seconds=0.0014521)), modelled_time(dict(seconds=11.53))
  ('1.452 ms', '11,530 ms')
  >>> modelled_time(dict(cycles=3_091_244))
  '3,091,244 cycles'
  """
  if "cycles" in modelled:
    return f"{modelled['cycles']:,} cycles"
  number = 1e3 * modelled["seconds"]
  return f"{number:{',.0f' if number >= 1000 else '.4g'}} ms"
