"""Compilers for absent devices.

Each compiler runs in its own Python environment, because it requires its own
JAX.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from sparse_transformer import schema, signals, tables
from sparse_transformer.targets.hardware import Target

# An environment variable that names the folder of the compilers' environments.
VARIABLE = "SPARSE_TRANSFORMER_TARGETS"
REPOSITORY = pathlib.Path(__file__).parents[2]
# The worker imports this library, but everything else from its own environment.
START = f"""{signals.END_WITH_PARENT}
import runpy
sys.path.append(sys.argv[2])
runpy.run_module("sparse_transformer.targets.worker", run_name="__main__")
"""
SETTINGS = dict(
  JAX_PLATFORMS="cpu",  # otherwise, libtpu would look for its devices
  TPU_SKIP_MDS_QUERY="1",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  TF_CPP_MIN_LOG_LEVEL="2",
  JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",  # omits line numbers from programs
)
# The fraction of a GPU's memory that JAX allocates by default. A program that
# needs more fits only if XLA_PYTHON_CLIENT_MEM_FRACTION is larger.
DEFAULT_FRACTION = 0.75
# Chooses the tiles of matrix products by a cost model, because they cannot be
# measured without a device.
GPU_FLAG = "--xla_gpu_experimental_cost_model_gemm_tiling_default=true"


def python(compiler: str) -> pathlib.Path:
  """Returns the Python interpreter in the environment of a compiler.

  Args:
    compiler: "cuda" or "tpu", a folder in `.venv/targets` or in the folder that
      `VARIABLE` names.

  Raises:
    ValueError: the environment does not exist.
  """
  folder = os.environ.get(VARIABLE) or REPOSITORY / ".venv" / "targets"
  path = pathlib.Path(folder) / compiler / "bin" / "python"
  if not path.exists():
    raise ValueError(
      f"the compiler for {compiler} is not installed: {path} is missing; run"
      f" `make targets` to install it, or set {VARIABLE} to the folder that"
      " contains it"
    )
  return path


def compile_for(
  target: Target, config: schema.Config, part: str = "step", **options: Any
) -> dict[str, Any]:
  """Compiles an experiment for a target, and reports the result.

  The program is not run, so no device is needed. The compiler runs in a
  separate process with its own JAX. Compilation may take minutes and several GB
  of memory.

  Args:
    target: the devices to compile for.
    config: the config of the experiment.
    part: "step" for the training step, or "attention" for the attention of each
      distinct pattern.
    **options: for "attention": `key_heads`, `segments`, and options of
      `attend`.

  Returns:
    The report as JSON, with an item in "programs" for each program. `render`
    converts it to text.

  Raises:
    ValueError: the compiler is not installed, or rejects the target.
    OSError: a signal ended the process of the compiler.
    RuntimeError: the worker failed for another reason.
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

    # In Python, the status of a process that signal N ended is -N.
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
  """Runs the worker in the environment of a compiler; returns its exit status.

  Args:
    target: the devices to compile for.
    request: JSON for the standard input of the worker.
    log: a new file for the standard error of the worker.
  """
  # The user's own flags come last, so that they take precedence.
  flags = [os.environ.get("XLA_FLAGS", "")]
  if target.compiler == "cuda":
    flags.insert(0, GPU_FLAG)

  # Remove PYTHONPATH, because packages of this environment would hide those of
  # the compiler's environment.
  environment = os.environ | SETTINGS | dict(XLA_FLAGS=" ".join(flags).strip())
  environment.pop("PYTHONPATH", None)
  # -P removes the current folder from the module search path.
  words = "-P", "-c", START, str(os.getpid()), str(REPOSITORY)

  with log.open("w") as file:
    done = subprocess.run(
      [python(target.compiler), *words],
      input=request,
      text=True,
      stdout=2,  # prints progress on standard error
      stderr=file,
      env=environment,
    )
  return done.returncode


def render(report: dict[str, Any]) -> str:
  """Returns the report of `compile_for` as text, one paragraph per program."""
  parts = [
    f"{report['target']}: {report['devices']} x {report['device']};"
    f" batch {report['batch_size']}, accumulation {report['accumulation']},"
    f" remat {report['remat']}; jax {report['jax']}\n"
    "The programs were compiled but not run; these are their properties."
  ]
  for program in report["programs"]:
    # The backend that would run attention on this device.
    rows = [("  attention", f"by {program['backend']}")]
    if "norms" in program:
      rows.append(("  norms", f"by {program['norms']}"))
    if program["compiles"]:
      rows += _rows(program, report)
    else:
      # `fits` is None if the compiler failed for a reason other than memory.
      verb = "fit" if program["fits"] is False else "compile"
      rows.append((f"  does not {verb}", program["reason"]))

    parts.append(f"{program['name']}\n{tables.align(rows)}")
  return "\n\n".join(parts)


def _rows(program, report):
  """Yields rows (title, value) about a program that compiles.

  Args:
    program: an item of "programs" in the report.
    report: the whole report.
  """
  # TPUs run a whole program by themselves, so operations are not launched.
  is_tpu = report["device"].startswith("TPU")
  seconds = program["trace_seconds"] + program["compile_seconds"]
  yield "  compiles", f"in {seconds:.0f} s"

  memory = program["memory"]
  room = report["memory"]
  fits = "fits" if program["fits"] else "does not fit"
  # There is no such fraction on TPUs.
  is_default = is_tpu or memory["peak"] <= DEFAULT_FRACTION * room
  if program["fits"] and not is_default:
    fits += ", with XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
  peak = f"{tables.size(memory['peak'])} of {tables.size(room)}: {fits}"
  yield "  peak memory", peak
  yield "  arguments", tables.size(memory["arguments"])
  yield "  temporaries", tables.size(memory["temporaries"])

  # If the number of iterations of a loop is unknown, counts are lower bounds.
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
