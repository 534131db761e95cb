"""Compilers in environments of their own, since each needs its own JAX."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from sparse_transformer import schema, signals, tables
from sparse_transformer.targets.hardware import Target

# A variable of the user's shell: the folder with an environment per compiler.
VARIABLE = "SPARSE_TRANSFORMER_TARGETS"
REPOSITORY = pathlib.Path(__file__).parents[2]
# The worker imports this library, but prefers its own environment for all else.
START = f"""{signals.END_WITH_PARENT}
import runpy
sys.path.append(sys.argv[2])
runpy.run_module("sparse_transformer.targets.worker", run_name="__main__")
"""
SETTINGS = dict(
  JAX_PLATFORMS="cpu",  # nothing runs; libtpu would look for its devices
  TPU_SKIP_MDS_QUERY="1",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  TF_CPP_MIN_LOG_LEVEL="2",
  JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",  # a program's text has no line numbers
)
# JAX allocates this fraction of a GPU's memory by default; a program that needs
# more fits only if XLA_PYTHON_CLIENT_MEM_FRACTION is larger.
DEFAULT_FRACTION = 0.75
# Tiles of matrix products come from a model of their cost: without a device,
# they cannot be measured.
GPU_FLAG = "--xla_gpu_experimental_cost_model_gemm_tiling_default=true"


def python(compiler: str) -> pathlib.Path:
  """The interpreter of the environment that has a compiler.

  Args:
    compiler: "cuda" or "tpu", a folder of `.venv/targets` or of the folder that
      `VARIABLE` names.

  Raises:
    ValueError: the environment is not there.
  """
  folder = os.environ.get(VARIABLE) or REPOSITORY / ".venv" / "targets"
  path = pathlib.Path(folder) / compiler / "bin" / "python"
  if not path.exists():
    raise ValueError(
      f"the compiler for {compiler} is not installed: {path} is missing; `make"
      f" targets` makes its environment, and {VARIABLE} names another folder"
    )
  return path


def compile_for(
  target: Target, config: schema.Config, part: str = "step", **options: Any
) -> dict[str, Any]:
  """Compiles an experiment for a target, and reports the result.

  Nothing runs, so that no device is needed. The compiler works in a process
  with another JAX, which may take minutes and several GB of memory.

  Args:
    target: the devices.
    config: the experiment's config.
    part: "step" of training, or "attention", each distinct pattern by itself.
    **options: for "attention": `key_heads`, `segments`, and options of
      `attend`.

  Returns:
    The report, as JSON, with one item in "programs" for each program; `render`
    prints it.

  Raises:
    ValueError: the compiler is not installed, or rejects the target.
    OSError: something ended its process.
    RuntimeError: the worker failed otherwise.
  """
  with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
    path = pathlib.Path(folder)
    request = dict(
      target=str(target),
      config=config.to_dict(),
      part=part,
      folder=folder,
      options=options,
    )
    print(f"{target}: starting", file=sys.stderr, flush=True)
    status = _run(target, json.dumps(request), path / "log")

    # Python gives -N as the status of a process that signal N ended.
    if status < 0:
      raise OSError(
        f"the compiler for {target} was ended by signal {-status}; a large"
        " program needs several GB of memory to compile"
      )
    if status:
      raise RuntimeError(
        f"compiling for {target} ended with status {status}:\n"
        + (path / "log").read_text()
      )

    answer = json.loads((path / "answer.json").read_text())

  if "error" in answer:
    raise ValueError(answer["error"])
  return answer["result"]


def _run(target, request, log):
  """Runs the worker in a process of the compiler; returns its status.

  Args:
    target: the devices.
    request: JSON for the worker's standard input.
    log: a new file for its standard error.
  """
  # The user's own flags come last, so that they win.
  flags = [os.environ.get("XLA_FLAGS", "")]
  if target.compiler == "cuda":
    flags.insert(0, GPU_FLAG)

  # Paths of this environment's packages would hide those of the compiler's.
  environment = os.environ | SETTINGS | dict(XLA_FLAGS=" ".join(flags).strip())
  environment.pop("PYTHONPATH", None)
  # -P keeps the current folder out of the paths of modules.
  words = "-P", "-c", START, str(os.getpid()), str(REPOSITORY)

  with log.open("w") as file:
    done = subprocess.run(
      [python(target.compiler), *words],
      input=request,
      text=True,
      stdout=2,  # shows progress
      stderr=file,
      env=environment,
    )
  return done.returncode


def render(report: dict[str, Any]) -> str:
  """The report of `compile_for` as text, with a paragraph for each program."""
  parts = [
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "Compiled for, not run on: these are properties of the program."
  ]
  for program in report["programs"]:
    # Which implementation of attention the network would use on that device.
    rows = [("  attention", f"by {program['backend']}")]
    if "norms" in program:
      rows.append(("  norms", f"by {program['norms']}"))
    if program["compiles"]:
      rows += _rows(program, report)
    else:
      # None, if the compiler failed for a reason that says nothing of memory.
      verb = "fit" if program["fits"] is False else "compile"
      rows.append((f"  does not {verb}", program["reason"]))

    parts.append(f"{program['name']}\n{tables.align(rows)}")
  return "\n\n".join(parts)


def _rows(program, report):
  """Yields rows of what is known of a program that compiles: (title, value).

  Args:
    program: an item of "programs" in the report.
    report: all of it.
  """
  # TPUs run a program by themselves; nothing is launched from outside.
  is_tpu = report["device"].startswith("TPU")
  seconds = program["trace_seconds"] + program["compile_seconds"]
  yield "  compiles", f"in {seconds:.0f} s"

  memory = program["memory"]
  room = report["memory"]
  fits = "fits" if program["fits"] else "does not fit"
  # TPUs have no such fraction.
  is_default = is_tpu or memory["peak"] <= DEFAULT_FRACTION * room
  if program["fits"] and not is_default:
    fits += ", with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
  peak = f"{tables.size(memory['peak'])} of {tables.size(room)}: {fits}"
  yield "  peak memory", peak
  yield "  arguments", tables.size(memory["arguments"])
  yield "  temporaries", tables.size(memory["temporaries"])

  # A loop that runs an unknown number of times makes counts lower bounds.
  parts = [f"{program['launches']:,} and {program['copies']:,} copies"]
  if program["unknown_loops"]:
    parts.append(f"at least, {program['unknown_loops']} loops counted once")

  most = program["most_launched"].items()
  parts.append(", ".join(f"{name} {count:,}" for name, count in most))
  yield "  operations" if is_tpu else "  launches", "; ".join(parts)

  collectives = [
    f"{kind} {moved['count']:,} ({tables.size(moved['bytes'])})"
    for kind, moved in program["collectives"].items()
  ]
  yield "  collectives", ", ".join(collectives) or "none"
