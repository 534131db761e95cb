"""Checks fused kernels before a run first uses them on a device.

The check runs in a separate process, because a kernel may hang or crash. The
child process is forked before the parent process uses the devices. This order
is necessary because only one process at a time can use a TPU, and XLA reserves
most of a GPU's memory. If devices are already in use, or several processes
train together, the check runs in this process instead.
"""

import contextlib
import dataclasses
import functools
import hashlib
import multiprocessing
import os
import pathlib
import signal
import sys
from importlib import metadata

import jax
from jax._src import xla_bridge  # no public API tells if devices are in use

from sparse_transformer import atomic
from sparse_transformer.attention import Split, registry, verify_request
from sparse_transformer.model import normalization
from sparse_transformer.training import costs
from sparse_transformer.training.experiment import Experiment

MAX_SECONDS = 300  # limit for one check, which usually takes a few seconds
DRIVER = pathlib.Path("/proc/driver/nvidia/version")
# Phrases in faults that may be temporary: device memory may be free another
# time, and a process may then not be killed. Faults about the memory of a block
# or core are permanent, because this memory never grows.
PASSING = "Out of memory", "memory space hbm", "status -9"


def avoid_wrong(experiment: Experiment) -> Experiment:
  """Avoids kernels whose results on this device differ from plain XLA's.

  The backend "auto" then does not choose attention backends that fail the
  check. Norms use plain XLA if their kernels fail the check. Prints a line on
  standard error for each kernel that it avoids.

  Args:
    experiment: the experiment whose network will run. Devices should not be in
      use yet.

  Returns:
    The experiment.
  """
  registry.avoid({})
  config = experiment.config
  model = experiment.model
  if not config.attention.check:
    return experiment

  # Requests name the platform, so creating them makes JAX use the devices.
  # Therefore only the process that runs the check may call this function.
  cases = lambda: _cases(config, model)
  is_used = xla_bridge.backends_are_initialized()
  is_used |= jax.distributed.is_initialized() or sys.platform != "linux"
  check = _verdicts if is_used else _verdicts_of_process

  # A check ends at the first fault. The faulty backend is then avoided, "auto"
  # chooses another one, and that one is checked as well.
  failed = []
  avoided = {}
  while verdicts := list(check(cases)):
    name, _, faults = verdicts[-1]
    if not faults:
      break
    failed.append(verdicts[-1])
    avoided[name] = "it failed its check"
    registry.avoid(avoided)

  for name, path, faults in failed:
    instead = "norms by plain XLA"
    if name != normalization.NAME:
      requests = costs.attention_requests(config, model)
      chosen = (registry.resolve("auto", x) for x in requests)
      instead = f"attention by {' and '.join(dict.fromkeys(chosen))}"
    kept = (
      f"to check it again, delete {path}"
      if path.exists()
      else "the next run checks it again"
    )
    print(
      f"warning: {instead}, not {name}, which failed its check:"
      f" {'; '.join(faults)}; {kept}",
      file=sys.stderr,
    )

  return experiment


def _cases(config, model):
  """Yields a tuple per check: (name, request, function that returns faults).

  Each check uses a single sequence on one device, which takes little time and
  memory. The verdict applies to all batch sizes and meshes.
  """
  requests = []
  if config.attention.backend == "auto":
    requests = costs.attention_requests(config, model)
  for request in requests:
    # Plain XLA is the reference for other backends. It is checked itself only
    # after another backend has failed, because the device may then be faulty.
    name = registry.resolve("auto", request)
    if name in registry.PLAIN and not registry.avoided():
      continue

    request = dataclasses.replace(request, batch=1, tile=0, split=Split())
    report = functools.partial(verify_request, request, name)
    yield name, request, lambda report=report: report().faults

  stream = jax.ShapeDtypeStruct((1, model.length, model.width), model.dtype)
  if normalization.unsupported(stream, config.model.remat) is None:
    question = stream.shape, stream.dtype.name, model.dropout
    verify = functools.partial(normalization.verify, *question)
    yield normalization.NAME, question, verify


def _verdicts(cases):
  """Checks kernels in this process until one has faults.

  Args:
    cases: a function that returns the cases, see `_cases`.

  Yields:
    (name, file of its verdict, faults). A check may crash the process, so a
    tuple whose faults are None is yielded before the check runs.
  """
  for name, question, find_faults in cases():
    path = _path(name, question)
    try:
      faults = atomic.read_json(path)
    except (OSError, ValueError):
      yield name, path, None
      faults = _kept(path, find_faults())

    yield name, path, faults
    if faults:
      return


def _verdicts_of_process(cases):
  """Yields the `_verdicts` of another process.

  If that process crashes or hangs during a check, the last verdict reports this
  fault.
  """
  fork = multiprocessing.get_context("fork")
  ours, theirs = fork.Pipe(duplex=False)
  child = fork.Process(target=_send, args=(theirs, cases), daemon=True)
  child.start()

  # Close this copy of the writing end, so that the pipe ends when the child
  # process ends.
  theirs.close()
  last = None
  with contextlib.suppress(EOFError):
    while True:
      last = ours.recv()
      yield last
  child.join()

  # If the child ended during a check, this is the fault of the backend.
  if last and last[2] is None:
    name, path, _ = last
    fault = f"its process ended with status {child.exitcode}"
    if child.exitcode == -signal.SIGALRM:
      fault = f"it took more than {MAX_SECONDS} seconds"
    yield name, path, _kept(path, [fault])
  elif child.exitcode:
    print("warning: kernels cannot be checked", file=sys.stderr)


def _send(pipe, cases):
  """Sends `_verdicts` through a pipe. This is the child's main function."""
  # Hide standard error, because the traceback of a crash would look as if the
  # run itself had crashed.
  with open(os.devnull, "w") as nowhere:
    os.dup2(nowhere.fileno(), 2)

  # Stop writing signals into the pipe that `Signals` reads in the run. Ctrl-C
  # reaches both processes, so the run would count two signals and end at once.
  signal.set_wakeup_fd(-1)

  # Leave the rest of the memory to the run.
  os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
  try:
    jax.devices()
  # The run will raise the same error, and explain it.
  except Exception:
    return

  # A kernel that hangs never returns to Python, so a Python handler would not
  # run. Only the signal's default action, which ends the process, can stop it.
  signal.signal(signal.SIGALRM, signal.SIG_DFL)
  signal.alarm(MAX_SECONDS)
  for verdict in _verdicts(cases):
    pipe.send(verdict)
    signal.alarm(MAX_SECONDS)


def _kept(path, faults):
  """Writes a verdict to its file, unless its faults may be temporary.

  Returns the faults.
  """
  if any(x in fault for x in PASSING for fault in faults):
    return faults

  # If the file cannot be written, the next run checks again.
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_json(path, faults)
  return faults


def _path(*question):
  """Returns the file of a verdict, named by a hash of all it depends on."""
  device = jax.local_devices()[0]
  # Include all packages, because cuDNN and kernel compilers are packages, too.
  packages = [f"{x.name} {x.version}" for x in metadata.distributions()]
  library = pathlib.Path(__file__).parents[1]
  identity = [
    question,
    device.device_kind,
    device.client.platform_version,
    jax.__version__,
    os.environ.get("XLA_FLAGS"),
    DRIVER.exists() and DRIVER.read_bytes(),
    sorted(packages),
    [path.read_bytes() for path in sorted(library.rglob("*.py"))],
  ]
  digest = hashlib.sha256(repr(identity).encode()).hexdigest()
  folder = jax.config.jax_compilation_cache_dir
  if not folder or "://" in folder:
    folder = os.path.expanduser("~/.cache/sparse_transformer/verdicts")
  return pathlib.Path(folder, f"verdict-{digest[:32]}.json")
