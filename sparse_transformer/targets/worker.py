"""Compiles what standard input requests; runs in a compiler's environment."""

import dataclasses
import functools
import json
import pathlib
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import use_abstract_mesh

from sparse_transformer import attention, config as config_lib
from sparse_transformer.attention import platforms, registry
from sparse_transformer.model import sharding
from sparse_transformer.patterns import shorten
from sparse_transformer.targets import hardware, hlo
from sparse_transformer.training import costs
from sparse_transformer.training.distributed import mesh
from sparse_transformer.training.experiment import Experiment


def main() -> None:
  """Answers one request."""
  request, began = json.load(sys.stdin), time.time()

  def tell(doing):
    seconds = time.time() - began
    print(f"{request['target']}: {doing} ({seconds:.0f} s)", flush=True)

  answer: dict[str, Any]
  try:
    answer = dict(result=_answer(request, tell))
  except (ValueError, OSError) as error:
    answer = dict(error=str(error))
  path = pathlib.Path(request["folder"], "answer.json")
  path.write_text(json.dumps(answer))


def _answer(request, tell):
  target = hardware.parse(request["target"])
  devices = _devices(target)
  config = config_lib.from_json(request["config"], "the config")
  experiment = Experiment(config, devices=tuple(devices))
  mesh.check_batch(config, experiment.mesh.shape)
  requests = costs.attention_requests(config, experiment.model, target.compiler)
  inputs = experiment.like, experiment.batch_like()
  programs = iter([("training step", requests, experiment.update, inputs)])
  if request["part"] == "attention":
    programs = _attention(experiment, requests, **request["options"])
  return dict(
    target=str(target),
    device=devices[0].device_kind,
    devices=len(devices),
    memory=target.memory,
    part=request["part"],
    batch_size=config.train.batch_size,
    accumulation=config.train.accumulation,
    remat=config.model.remat,
    jax=jax.__version__,
    programs=[_report(x, experiment, target, tell) for x in programs],
  )


def _devices(target: hardware.Target) -> list[jax.Device]:
  """The devices of a target; raises ValueError if its compiler rejects it."""
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
  """Programs, see `_report`: both passes of each distinct pattern."""
  model, train = experiment.model, experiment.config.train
  size = train.batch_size // train.accumulation, model.length
  sharding = experiment.batch_sharding
  array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
  widths, num = model.widths, key_heads or model.num_key_heads
  dtype = jnp.dtype(model.dtype)
  q, dout = (array((*size, model.num_heads, width), dtype) for width in widths)
  k, v = (array((*size, num, width), dtype) for width in widths)
  options |= dict(backend=model.backend, tile=model.tile)
  for request in requests:
    request = dataclasses.replace(
      request,
      num_key_heads=num,
      scores=attention.Scores(softcap=options.get("softcap", 0.0)),
      segments=request.segments or segments,
    )
    segments_BL = array(size, jnp.int32) if request.segments else None
    sinks_H = np.zeros(model.num_heads) if request.sinks else None
    options |= dict(patterns=request.patterns, sinks_H=sinks_H)
    attend = functools.partial(attention.attend, **options)
    run = jax.jit(functools.partial(_with_gradients, attend))
    name = shorten(", ".join(dict.fromkeys(map(str, request.patterns))))
    yield f"attention: {name}", [request], run, (q, k, v, dout, segments_BL)


def _with_gradients(attend, q_BLHK, k_BLGK, v_BLGE, dout_BLHE, segments_BL):
  spec = sharding.heads(*q_BLHK.shape[:2])
  attend = functools.partial(attend, segments_BL=segments_BL, spec=spec)
  out, backward = jax.vjp(attend, q_BLHK, k_BLGK, v_BLGE)
  return out, backward(dout_BLHE)


def _report(program, experiment, target, tell):
  """The report of (name, attention, jitted function, arguments)."""
  (name, requests, function, arguments), began = program, time.time()
  absent = platforms.targeting(target.compiler, target.capability)
  devices = experiment.mesh.abstract_mesh
  # Kernels ask for the device when they are lowered and, since each device runs
  # a kernel on its own part, once more when the program is divided.
  with absent, use_abstract_mesh(devices):
    executor = registry.explain_choice(experiment.model.backend, *requests)
    report = dict(name=name, executor=executor)
    tell(f"{name}: tracing")
    try:
      traced = function.trace(*arguments)
      lowered = traced.lower(lowering_platforms=(target.compiler,))
      report["trace_seconds"] = round(time.time() - began, 1)
      tell(f"{name}: compiling")
      began = time.time()
      compiled = lowered.compile()
    except RuntimeError as error:  # of JAX, or of cuDNN if it is missing
      fits = False if "hbm" in str(error).lower() else None
      reason = _first_line(error)
      return report | dict(compiles=False, fits=fits, reason=reason)
  report["compile_seconds"] = round(time.time() - began, 1)
  tell(f"{name}: reading the program")
  text, memory = compiled.as_text(), compiled.memory_analysis()
  profile = hlo.profile(text)
  peak = memory.peak_memory_in_bytes
  # The compiler for TPUs rejects what does not fit.
  fits = target.compiler == "tpu" or peak <= target.memory
  return report | dict(
    compiles=True,
    fits=fits,
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


def _first_line(error: Exception) -> str:
  """The first line of an error; of one that quotes a traceback, its error."""
  first, _, rest = str(error).strip().partition("\n")
  if "Traceback" not in first:
    return first
  errors = re.findall(r"^\w+(?:Error|Exception): .*", rest, re.MULTILINE)
  return " ".join([first.partition("Traceback")[0].strip(), *errors[-1:]])


if __name__ == "__main__":
  main()
