"""The worker: compiles the programs that a request on standard input names.

The worker runs in the Python environment of a compiler.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import use_abstract_mesh

from sparse_transformer import attention, config as config_lib, schema
from sparse_transformer.attention import Request, platforms, registry
from sparse_transformer.model import normalization, sharding
from sparse_transformer.patterns import shorten
from sparse_transformer.targets import compilers, hardware, hlo
from sparse_transformer.training import costs, rematerialization
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment

# The start time of the process, for messages about progress.
BEGAN = time.monotonic()


class Program(NamedTuple):
  """A program to compile.

  Attributes:
    name: the name in messages and in the report.
    requests: the requests of its attention.
    function: a jitted function.
    arguments: the arguments, as `jax.ShapeDtypeStruct`s with shardings.
  """

  name: str
  requests: Sequence[Request]
  function: Any
  arguments: tuple


def main() -> None:
  """Reads a request from standard input, and writes the answer to a file.

  The request and the answer are JSON. The request names the folder in which the
  answer is written.
  """
  request = json.load(sys.stdin)
  # Report errors that a user can fix. All other errors end the process with a
  # traceback.
  answer: dict[str, Any]
  try:
    answer = dict(result=_answer(request))
  except (ValueError, OSError) as error:
    answer = dict(error=str(error))

  path = pathlib.Path(request["folder"], "answer.json")
  path.write_text(json.dumps(answer))


def _answer(request):
  """Returns the report on a request, see `compilers.compile_for`.

  Programs are traced with shapes instead of parameters and data. Raises
  ValueError or OSError if the request is impossible.
  """
  target = hardware.parse(request["target"])
  devices = _devices(target)

  config = config_lib.from_json(request["config"], "the config")
  experiment = Experiment(config, devices=tuple(devices))
  mesh.check_batch(config, experiment.mesh.shape)
  requests = costs.attention_requests(config, experiment.model, target.compiler)
  remat = config.model.remat
  if request["part"] == "attention":
    programs = _attention(experiment, requests, **request["options"])
    reports = [_report(x, experiment, target) for x in programs]
  else:
    remat, report = _report_step(experiment, requests, target)
    reports = [report]

  return dict(
    target=str(target),
    device=devices[0].device_kind,
    devices=len(devices),
    memory=target.memory,
    part=request["part"],
    batch_size=config.train.batch_size,
    accumulation=config.train.accumulation,
    remat=remat,
    jax=jax.__version__,
    programs=reports,
  )


def _report_step(experiment, requests, target):
  """Reports a training step.

  With `model.remat=auto`, the report describes the program that a run would
  choose.

  Args:
    experiment: the experiment, on the devices of the target.
    requests: the requests of its attention.
    target: the devices.

  Returns:
    (what the backward pass recomputes, an item of "programs").
  """
  asked = experiment.config.model.remat
  remats = schema.REMATS if asked == "auto" else (asked,)
  for remat in remats:
    variant = experiment.with_remat(remat)
    program = Program(
      name="training step",
      requests=requests,
      function=variant.update,
      arguments=(variant.like, variant.batch_like()),
    )
    report = _report(program, variant, target)
    report["norms"] = _norms(variant, target)
    if report["compiles"] and _has_room(report["memory"], target):
      break
  return remat, report


def _norms(experiment, target):
  """Returns which implementation computes norms on a target, and why."""
  model = experiment.model
  train = experiment.config.train
  shape = train.batch_size // train.accumulation, model.length, model.width
  stream = jax.ShapeDtypeStruct(shape, model.dtype)
  with _targeting(experiment, target):
    return normalization.explain_choice(stream, model.remat)


def _has_room(memory, target):
  """Returns whether a run would choose a program that needs this memory."""
  # The memory that JAX allocates by default, minus the state.
  fraction = compilers.DEFAULT_FRACTION if target.compiler == "cuda" else 1
  free = fraction * target.memory - memory["arguments"]
  return memory["temporaries"] <= rematerialization.SHARE * free


def _devices(target: hardware.Target) -> list[jax.Device]:
  """Returns the devices of a target.

  Raises ValueError if the compiler rejects the target.
  """
  # A topology describes devices for which programs can be compiled but not run.
  describe = topologies.get_topology_desc
  try:
    if target.compiler == "tpu":
      return describe(str(target), "tpu").devices
    gpu = dict(target_config=target.gpu_config, topology=target.topology)
    return describe("", "cuda", **gpu).devices
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f"the compiler rejects target {str(target)!r}: {_first_line(error)}"
    ) from error


def _attention(experiment, requests, key_heads=0, segments=False, **options):
  """Yields a program for each request: attention, forward and backward.

  Args:
    experiment: the experiment, on the devices of the target.
    requests: the requests of the network's attention, one for each distinct
      tuple of patterns.
    key_heads: the number of KV heads; 0 for the number in the network.
    segments: whether to add segments if the network has none.
    **options: further arguments of `attend`.
  """
  model = experiment.model
  train = experiment.config.train
  key_heads = key_heads or model.num_key_heads
  # Use the size of a micro-batch, which is what is processed at a time.
  size = train.batch_size // train.accumulation, model.length

  def array(heads, width):
    return jax.ShapeDtypeStruct(
      (*size, heads, width), model.dtype, sharding=experiment.batch_sharding
    )

  qk_width, value_width = model.widths
  q = array(model.num_heads, qk_width)
  dout = array(model.num_heads, value_width)
  k = array(key_heads, qk_width)
  v = array(key_heads, value_width)

  # Requests must include the softcap, because not all backends support it.
  softcap = options.get("softcap", 0.0)
  for request in requests:
    request = dataclasses.replace(
      request,
      num_key_heads=key_heads,
      scores=attention.Scores(softcap=softcap),
      segments=request.segments or segments,
    )

    segments_BL = None
    if request.segments:
      segments_BL = jax.ShapeDtypeStruct(
        size, jnp.int32, sharding=experiment.batch_sharding
      )

    # Use constants for these, because compilation does not depend on their
    # values.
    sinks_H: Any = np.zeros(model.num_heads) if request.sinks else None
    bias_HD: Any = None
    if request.bias:
      # Distances lie between 1 - length and length - 1.
      num_distances = 2 * model.length - 1
      bias_HD = np.zeros((model.num_heads, num_distances), np.float32)
    attend = functools.partial(
      attention.attend,
      patterns=request.patterns,
      sinks_H=sinks_H,
      bias_HD=bias_HD,
      backend=model.backend,
      tile=model.tile,
      **options,
    )

    # List each distinct pattern once.
    names = dict.fromkeys(map(str, request.patterns))
    yield Program(
      name=f"attention: {shorten(', '.join(names))}",
      requests=[request],
      function=jax.jit(functools.partial(_with_gradients, attend)),
      arguments=(q, k, v, dout, segments_BL),
    )


def _with_gradients(attend, q_BLHK, k_BLGK, v_BLGE, dout_BLHE, segments_BL):
  """Returns the output of attention, and the gradients of q, k and v."""
  # Compute this inside jit, where the mesh is known.
  spec = sharding.heads(*q_BLHK.shape[:2])
  attend = functools.partial(attend, segments_BL=segments_BL, spec=spec)
  out, backward = jax.vjp(attend, q_BLHK, k_BLGK, v_BLGE)
  return out, backward(dout_BLHE)


def _report(program, experiment, target):
  """Compiles a program, and returns a report about it.

  Args:
    program: the program.
    experiment: the experiment, on the devices of the target.
    target: the devices.

  Returns:
    An item of "programs" in the report, as JSON. If the program does not
    compile, the item includes the `reason`. Then `fits` is False if the program
    needs too much memory, and None if it fails for another reason.
  """
  name = program.name
  with _targeting(experiment, target):
    report = dict(
      name=name,
      backend=registry.explain_choice(
        experiment.model.backend, *program.requests
      ),
    )
    began = _tell(target, f"{name}: tracing")
    try:
      traced = program.function.trace(*program.arguments)
      # Otherwise, the program would be lowered for the CPU of this process.
      lowered = traced.lower(lowering_platforms=(target.compiler,))
      lowered_at = _tell(target, f"{name}: compiling")
      report["trace_seconds"] = round(lowered_at - began, 1)
      compiled = lowered.compile()
    except RuntimeError as error:  # from JAX, or from cuDNN if it is missing
      # If memory is exceeded, the error of the compiler for TPUs mentions HBM.
      fits = False if "hbm" in str(error).lower() else None
      reason = _first_line(error)
      return report | dict(compiles=False, fits=fits, reason=reason)

  ended = _tell(target, f"{name}: reading the program")

  memory = compiled.memory_analysis()
  profile = hlo.profile(compiled.as_text())
  peak = memory.peak_memory_in_bytes
  return report | dict(
    compile_seconds=round(ended - lowered_at, 1),
    compiles=True,
    # The compiler for TPUs rejects programs that do not fit.
    fits=target.compiler == "tpu" or peak <= target.memory,
    memory=dict(  # bytes on one device
      peak=peak,
      arguments=memory.argument_size_in_bytes,
      temporaries=memory.temp_size_in_bytes,
    ),
    launches=profile.launches.total(),
    copies=profile.copies,
    unknown_loops=profile.unknown_loops,
    most_launched=dict(profile.launches.most_common(3)),
    collectives={
      kind: dict(count=count, bytes=size)
      for kind, (count, size) in sorted(profile.collectives.items())
    },
  )


@contextlib.contextmanager
def _targeting(experiment, target):
  """A context in which programs of an experiment are traced for a target."""
  # Kernels query the device when they are lowered, and again when the program
  # is partitioned, so the context must include both.
  with (
    platforms.targeting(target.compiler, target.capability),
    use_abstract_mesh(experiment.mesh.abstract_mesh),
  ):
    yield


def _tell(target, doing):
  """Prints what is being done, and returns the seconds since the start."""
  seconds = time.monotonic() - BEGAN
  print(f"{target}: {doing} ({seconds:.0f} s)", flush=True)
  return seconds


def _first_line(error: Exception) -> str:
  """Returns the first line of an error message.

  If the message quotes a traceback, returns the text before the traceback and
  the error at its end.
  """
  first, _, rest = str(error).strip().partition("\n")
  if "Traceback" not in first:
    return first

  errors = re.findall(r"^\w+(?:Error|Exception): .*", rest, re.MULTILINE)
  return " ".join([first.partition("Traceback")[0].strip(), *errors[-1:]])


if __name__ == "__main__":
  main()
