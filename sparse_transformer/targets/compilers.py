"""The compilers' environments, and the processes that compile in them.

A compiler must match its version of JAX, so each has an environment of its own,
which `make targets` makes.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer import signals
from sparse_transformer.targets.hardware import Target

VARIABLE = "SPARSE_TRANSFORMER_TARGETS"  # the folder with the environments
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
  target: Target,
  config: ConfigDict,
  part: str = "step",
  **options: Any,
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
    request = dict(target=str(target), config=config.to_dict(), part=part)
    request |= dict(folder=folder, options=options)
    # The user's own flags come last, so that they win.
    own = GPU_FLAG if target.compiler == "cuda" else ""
    flags = f"{own} {os.environ.get('XLA_FLAGS', '')}".strip()
    environment = os.environ | SETTINGS | dict(XLA_FLAGS=flags)
    environment.pop("PYTHONPATH", None)
    print(f"{target}: starting", file=sys.stderr, flush=True)
    given = str(os.getpid()), str(REPOSITORY)
    with (path / "log").open("w") as log:
      done = subprocess.run(
        [python(target.compiler), "-P", "-c", START, *given],
        input=json.dumps(request),
        text=True,
        stdout=2,  # shows progress
        stderr=log,
        env=environment,
      )
    if (status := done.returncode) < 0:
      raise OSError(
        f"the compiler for {target} was ended by signal {-status}; a large"
        " program needs several GB of memory to compile"
      )
    if status:
      said = (path / "log").read_text()
      raise RuntimeError(
        f"compiling for {target} ended with status {status}:\n{said}"
      )
    answer = json.loads((path / "answer.json").read_text())
    if "error" in answer:
      raise ValueError(answer["error"])
    return answer["result"]
