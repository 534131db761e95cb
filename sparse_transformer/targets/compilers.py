"""The compilers' environments, and the processes that compile in them.

`make targets` makes an environment for each compiler, since it must match the
version of JAX, and each brings its own.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ml_collections import ConfigDict

from sparse_transformer.targets import kernels
from sparse_transformer.targets.hardware import Target

VARIABLE = "SPARSE_TRANSFORMER_TARGETS"  # the folder with the environments
REPOSITORY = pathlib.Path(__file__).parents[2]
# The worker imports this library, but prefers its own environment for all else.
START = (
  "import runpy, sys; sys.path.append(sys.argv[1]);"
  " runpy.run_module('sparse_transformer.targets.worker', run_name='__main__')"
)
SETTINGS = dict(
  JAX_PLATFORMS="cpu",  # nothing runs; libtpu would look for its devices
  TPU_SKIP_MDS_QUERY="1",
  TPU_WORKER_HOSTNAMES="localhost",
  ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  TF_CPP_MIN_LOG_LEVEL="2",
  JAX_TRACEBACK_IN_LOCATIONS_LIMIT="0",  # a program's text has no line numbers
)
XLA_FLAGS = {
  "cuda": ("--xla_gpu_experimental_cost_model_gemm_tiling_default=true",),
  "tpu": (),
}


def python(compiler: str) -> pathlib.Path:
  """The interpreter of a compiler's environment.

  Raises:
    ValueError: the environment does not exist.
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
  target: Target,
  config: ConfigDict,
  part: str = "step",
  known: Sequence[str] = (),
) -> dict[str, Any]:
  """Compiles an experiment for a target, and reports the result.

  Shows progress on standard error.

  Args:
    target: the devices.
    config: the experiment's config.
    part: "step", the training step, or "attention", each distinct pattern of a
      layer by itself.
    known: the `digest` of programs that need not be compiled again: their
      reports end with it.

  Raises:
    ValueError: the compiler is not installed, or it rejects the request.
    OSError: something ended its process.
  """
  with tempfile.TemporaryDirectory(prefix="compiled-") as folder:
    request = dict(
      target=str(target),
      config=config.to_dict(),
      part=part,
      known=known,
      dump=folder,
    )
    flags = [*XLA_FLAGS[target.compiler]]
    if target.compiler == "cuda":
      flags += kernels.flags(pathlib.Path(folder))
    # The user's own flags come last, so that they win.
    flags.append(os.environ.get("XLA_FLAGS", ""))
    environment = os.environ | SETTINGS | dict(XLA_FLAGS=" ".join(flags))
    environment.pop("PYTHONPATH", None)
    log = tempfile.TemporaryFile("w+")
    process = subprocess.Popen(
      [python(target.compiler), "-P", "-c", START, str(REPOSITORY)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=log,
      env=environment,
      text=True,
    )
    with log, process, contextlib.ExitStack() as stack:
      stack.callback(process.kill)  # if it still runs, for example after Ctrl-C
      assert process.stdin and process.stdout
      process.stdin.write(json.dumps(request))
      process.stdin.close()
      began, doing = time.time(), "starting"
      while True:
        seconds = time.time() - began
        print(f"{target}: {doing} ({seconds:.0f} s)", file=sys.stderr)
        if not (line := process.stdout.readline()):
          break
        answer = json.loads(line)
        if "error" in answer:
          raise ValueError(answer["error"])
        if "result" in answer:
          return answer["result"]
        doing = answer["doing"]
      if (status := process.wait()) < 0:
        raise OSError(
          f"the compiler for {target} was ended by signal {-status}; a large"
          " program needs several GB of memory to compile"
        )
      log.seek(0)
      raise RuntimeError(
        f"compiling for {target} ended with status {status}:\n{log.read()}"
      )
