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

# The variable that names the folder with the environments.
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
# XLA allocates this fraction of a GPU's memory by default.
DEFAULT_FRACTION = 0.75
GPU_FLAG = "--xla_gpu_experimental_cost_model_gemm_tiling_default=true"


def python(compiler: str) -> pathlib.Path:
  """The interpreter of a compiler's environment; ValueError without one."""
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

  Raises ValueError if its compiler is not installed, or rejects it; OSError if
  something ended its process.

  Args:
    target: the devices.
    config: the experiment's config.
    part: "step" of training, or "attention", each distinct pattern by itself.
    **options: for "attention": `key_heads`, `segments`, and options of
      `attend`.
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
  """Runs the worker in a process of the compiler; returns its status."""
  # The user's own flags come last, so that they win.
  flags = [os.environ.get("XLA_FLAGS", "")]
  if target.compiler == "cuda":
    flags.insert(0, GPU_FLAG)
  environment = os.environ | SETTINGS | dict(XLA_FLAGS=" ".join(flags).strip())
  environment.pop("PYTHONPATH", None)
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
  """The report as text."""
  parts = [
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "Compiled for, not run on: these are properties of the program."
  ]
  for program in report["programs"]:
    rows = [("  attention", f"by {program['executor']}")]
    if program["compiles"]:
      rows += _rows(program, report)
    else:
      verb = "fit" if program["fits"] is False else "compile"
      rows.append((f"  does not {verb}", program["reason"]))
    parts.append(f"{program['name']}\n{tables.align(rows)}")
  return "\n\n".join(parts)


def _rows(program, report):
  """What is known of a program that compiles."""
  # TPUs run a program by themselves; nothing is launched from outside.
  is_tpu = report["device"].startswith("TPU")
  seconds = program["trace_seconds"] + program["compile_seconds"]
  yield "  compiles", f"in {seconds:.0f} s"

  memory = program["memory"]
  room = report["memory"]
  fits = "fits" if program["fits"] else "does not fit"
  is_default = is_tpu or memory["peak"] <= DEFAULT_FRACTION * room
  if program["fits"] and not is_default:
    fits += ", with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
  peak = f"{tables.size(memory['peak'])} of {tables.size(room)}: {fits}"
  yield "  peak memory", peak
  yield "  arguments", tables.size(memory["arguments"])
  yield "  temporaries", tables.size(memory["temporaries"])

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
