"""The executors by name, and the choice of one for a request."""

from collections.abc import Mapping, Sequence

from sparse_transformer.attention.contract import (
  Executor,
  Request,
  Unsupported,
)
from sparse_transformer.attention.executors import dense, xla
from sparse_transformer.attention.executors.cudnn import Cudnn
from sparse_transformer.attention.executors.mosaic import Mosaic
from sparse_transformer.attention.executors.triton import Triton
from sparse_transformer.attention.platforms import PLATFORMS

DENSE = "dense"  # the reference, which has no plans and is not registered
PLAIN = DENSE, "batched", "streamed"  # which have no kernels

EXECUTORS: dict[str, Executor] = {}
_PREFERRED: dict[str, Sequence[str]] = {}  # the platforms that prefer each
_AVOIDED: dict[str, str] = {}  # see `avoid`


def register(
  name: str, executor: Executor, platforms: Sequence[str] = ()
) -> None:
  """Adds an executor, which `attend` and the config can name.

  Args:
    name: its name, as a `backend`.
    executor: the executor, hashable, since programs are cached by it.
    platforms: those of `PLATFORMS` on which "auto" tries it before all earlier
      ones. On others, it is tried after them.

  Raises:
    ValueError: the name is taken, or a platform is unknown.
  """
  if name in backends():
    raise ValueError(f"backend {name!r} is already registered")
  if unknown := set(platforms) - set(PLATFORMS):
    raise ValueError(
      f"unknown platforms {sorted(unknown)}; known: {', '.join(PLATFORMS)}"
    )
  EXECUTORS[name] = executor
  _PREFERRED[name] = platforms


def unregister(name: str) -> None:
  """Removes an executor."""
  del EXECUTORS[name], _PREFERRED[name]
  _AVOIDED.pop(name, None)


def backends() -> tuple[str, ...]:
  """All values that `attention.backend` may have."""
  return "auto", DENSE, *EXECUTORS


def avoid(reasons: Mapping[str, str]) -> None:
  """Sets the executors that "auto" does not choose from now on.

  Programs that are compiled already keep theirs.

  Args:
    reasons: {name: why it is avoided}. They replace those of earlier calls.
  """
  _AVOIDED.clear()
  _AVOIDED.update(reasons)


def avoided() -> dict[str, str]:
  """The reasons that `avoid` has set."""
  return dict(_AVOIDED)


def resolve(backend: str, request: Request) -> str:
  """Names what runs a request on its platform: "dense", or an executor.

  Raises:
    ValueError: the backend is unknown.
    Unsupported: it cannot run this request, for the reason that is said.
  """
  name, _ = _search(backend, request)
  return name


def explain_choice(backend: str, *requests: Request) -> str:
  """Says what runs requests, and why not what "auto" would rather choose.

  Args:
    backend: as in `attend`.
    *requests: those of a program, such as one for each kind of layer.

  Returns:
    A phrase, as in "triton; not cudnn: Local(64) is not dense".
  """
  choices = []
  for request in requests:
    name, reasons = _search(backend, request)
    rejected = (f"{other}: {reason}" for other, reason in reasons.items())
    choices.append("; not ".join([name, *rejected]))
  return ", or ".join(dict.fromkeys(choices))


def choose(backend: str, request: Request) -> Executor | None:
  """What `resolve` names; None for the reference."""
  return EXECUTORS.get(resolve(backend, request))


def _search(backend, request):
  """(what runs a request, {what was tried before it: why that cannot}).

  "auto" tries the executors that are preferred on the platform, the latest
  registered first, then the others in the order of their registration.
  """
  if backend not in backends():
    raise ValueError(f"unknown {backend=}; known: {', '.join(backends())}")

  names = [backend]
  if backend == "auto":
    latest_first = reversed(_PREFERRED.items())
    preferred = [name for name, on in latest_first if request.platform in on]
    # The first that was registered, plain XLA, runs every request.
    names = list(dict.fromkeys(preferred + list(EXECUTORS)))

  reasons: dict[str, str] = {}
  for name in names:
    runs = dense if name == DENSE else EXECUTORS[name]
    # Who names an executor gets it, even one to be avoided.
    reason = _AVOIDED.get(name) if backend == "auto" else None
    reason = reason or runs.unsupported(request)
    if reason is None:
      return name, reasons
    reasons[name] = reason

  raise Unsupported(
    "; ".join(
      f"backend={name} cannot run this case: {reason}"
      for name, reason in reasons.items()
    )
  )


# "auto" tries later ones first: cuDNN before Triton, if it can run a request.
register("batched", xla.ON_ACCELERATORS)
register("streamed", xla.ON_CPUS, platforms=("cpu",))
register("triton", Triton(), platforms=("cuda",))
register("cudnn", Cudnn(), platforms=("cuda",))
register("mosaic", Mosaic(), platforms=("tpu",))
