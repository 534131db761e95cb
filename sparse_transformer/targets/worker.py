"""Compiles what standard input requests; runs in a compiler's environment."""

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

# When the process began, for messages about how long it takes.
BEGAN = time.monotonic()


class Program(NamedTuple):
  """A program to compile.

  Attributes:
    name: printed, and a title in the report.
    requests: of attention in it.
    function: jitted.
    arguments: its arguments, as `jax.ShapeDtypeStruct`s with shardings.
  """

  name: str
  requests: Sequence[Request]
  function: Any
  arguments: tuple


def main() -> None:
  """Answers one request, as JSON on standard input, in a file of its folder."""
  request = json.load(sys.stdin)
  # Errors that a user can fix; all others end the process with a traceback.
  answer: dict[str, Any]
  try:
    answer = dict(result=_answer(request))
  except (ValueError, OSError) as error:
    answer = dict(error=str(error))

  path = pathlib.Path(request["folder"], "answer.json")
  path.write_text(json.dumps(answer))


def _answer(request):
  """The report on a request, see `compilers.compile_for`.

  Programs are traced with shapes in place of parameters and data. Raises
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
  """Reports a training step; with `model.remat=auto`, what a run would choose.

  Args:
    experiment: the experiment, on the devices of the target.
    requests: of its attention.
    target: the devices.

  Returns (what the backward pass recomputes, an item of "programs").
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
  """What computes the norms of a training step on a target, and why."""
  model = experiment.model
  train = experiment.config.train
  shape = train.batch_size // train.accumulation, model.length, model.width
  stream = jax.ShapeDtypeStruct(shape, model.dtype)
  with _targeting(experiment, target):
    return normalization.explain_choice(stream, model.remat)


def _has_room(memory, target):
  """Whether a run would choose a program that needs this memory."""
  # What JAX allocates by default, without the state.
  fraction = compilers.DEFAULT_FRACTION if target.compiler == "cuda" else 1
  free = fraction * target.memory - memory["arguments"]
  return memory["temporaries"] <= rematerialization.SHARE * free


def _devices(target: hardware.Target) -> list[jax.Device]:
  """The devices of a target; raises ValueError if its compiler rejects it."""
  # A topology is a description of devices, by which a program can be compiled
  # but not run.
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
  """Yields programs of both passes of each distinct pattern.

  Args:
    experiment: the experiment, on the devices of the target.
    requests: of the network's attention, one for each pattern.
    key_heads: number of heads of keys and values; 0: as in the network.
    segments: whether to add segments where the network has none.
    **options: of `attend`.
  """
  model = experiment.model
  train = experiment.config.train
  key_heads = key_heads or model.num_key_heads
  # One microbatch: what is in memory at a time.
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

  # A softcap decides which backends can run it, so that requests name it too.
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

    # Their values do not matter to the compiler: they are constants here.
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

    # Heads with one pattern are named once.
    names = dict.fromkeys(map(str, request.patterns))
    yield Program(
      name=f"attention: {shorten(', '.join(names))}",
      requests=[request],
      function=jax.jit(functools.partial(_with_gradients, attend)),
      arguments=(q, k, v, dout, segments_BL),
    )


def _with_gradients(attend, q_BLHK, k_BLGK, v_BLGE, dout_BLHE, segments_BL):
  """Attention's output, and the gradients of q, k and v for a given `dout`."""
  # Inside of jit, where the mesh is known.
  spec = sharding.heads(*q_BLHK.shape[:2])
  attend = functools.partial(attend, segments_BL=segments_BL, spec=spec)
  out, backward = jax.vjp(attend, q_BLHK, k_BLGK, v_BLGE)
  return out, backward(dout_BLHE)


def _report(program, experiment, target):
  """Compiles a program, and reports what the compiler made of it.

  Args:
    program: the program.
    experiment: the experiment, on the devices of the target.
    target: the devices.

  Returns:
    An item of "programs" in the report, as JSON. If it does not compile, it has
    `reason`, and `fits` is False if that is memory, otherwise None.
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
      # Without this, it would be lowered for the CPU of this process.
      lowered = traced.lower(lowering_platforms=(target.compiler,))
      lowered_at = _tell(target, f"{name}: compiling")
      report["trace_seconds"] = round(lowered_at - began, 1)
      compiled = lowered.compile()
    except RuntimeError as error:  # of JAX, or of cuDNN if it is missing
      # Compilers for TPUs say so if memory is exceeded.
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
    # The compiler for TPUs rejects what does not fit.
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
  """Traces programs of an experiment for a target, within `with`."""
  # Kernels ask for the device when they are lowered and, since each device runs
  # a kernel on its own part, once more when the program is divided.
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
  """The first line of an error; of one that quotes a traceback, its error."""
  # A quoted traceback ends with the error that matters.
  first, _, rest = str(error).strip().partition("\n")
  if "Traceback" not in first:
    return first

  errors = re.findall(r"^\w+(?:Error|Exception): .*", rest, re.MULTILINE)
  return " ".join([first.partition("Traceback")[0].strip(), *errors[-1:]])


if __name__ == "__main__":
  main()
