"""The backends by name, and the choice of one for a request."""

from collections.abc import Mapping, Sequence

from sparse_transformer.attention.backends import dense, xla
from sparse_transformer.attention.backends.cudnn import Cudnn
from sparse_transformer.attention.backends.mosaic import Mosaic
from sparse_transformer.attention.backends.triton import Triton
from sparse_transformer.attention.contract import (
  Backend,
  Request,
  Unsupported,
)
from sparse_transformer.attention.platforms import PLATFORMS

DENSE = "dense"  # the reference, which has no plans and is not registered
PLAIN = DENSE, "batched", "streamed"  # which have no kernels

BACKENDS: dict[str, Backend] = {}
_PREFERRED: dict[str, Sequence[str]] = {}  # the platforms that prefer each
_AVOIDED: dict[str, str] = {}  # see `avoid`


def register(
  name: str, backend: Backend, platforms: Sequence[str] = ()
) -> None:
  """Adds a backend, which `attend` and the config can name.

  Args:
    name: its name, as a `backend`.
    backend: the backend, hashable, since programs are cached by it.
    platforms: those of `PLATFORMS` on which "auto" tries it before all earlier
      ones. On others, it is tried after them.

  Raises:
    ValueError: the name is taken, or a platform is unknown.
  """
  if name in names():
    raise ValueError(f"backend {name!r} is already registered")
  if unknown := set(platforms) - set(PLATFORMS):
    raise ValueError(
      f"unknown platforms {sorted(unknown)}; known: {', '.join(PLATFORMS)}"
    )
  BACKENDS[name] = backend
  _PREFERRED[name] = platforms


def unregister(name: str) -> None:
  """Removes a backend."""
  del BACKENDS[name], _PREFERRED[name]
  _AVOIDED.pop(name, None)


def names() -> tuple[str, ...]:
  """All values that `attention.backend` may have."""
  return "auto", DENSE, *BACKENDS


def avoid(reasons: Mapping[str, str]) -> None:
  """Sets the backends that "auto" does not choose from now on.

  Programs that are compiled already keep theirs.

  Args:
    reasons: {name: why it is avoided}. They replace those of earlier calls.
  """
  _AVOIDED.clear()
  _AVOIDED.update(reasons)


def avoided() -> dict[str, str]:
  """The reasons that `avoid` has set."""
  return dict(_AVOIDED)


def resolve(name: str, request: Request) -> str:
  """Names what runs a request on its platform: "dense", or a backend.

  Raises:
    ValueError: the backend is unknown.
    Unsupported: it cannot run this request, for the reason that is said.
  """
  found, _ = _search(name, request)
  return found


def explain_choice(name: str, *requests: Request) -> str:
  """Says what runs requests, and why not what "auto" would rather choose.

  Args:
    name: as `backend` in `attend`.
    *requests: those of a program, such as one for each kind of layer.

  Returns:
    A phrase, as in "triton; not cudnn: Local(64) is not dense".
  """
  choices = []
  for request in requests:
    found, reasons = _search(name, request)
    rejected = (f"{other}: {reason}" for other, reason in reasons.items())
    choices.append("; not ".join([found, *rejected]))
  return ", or ".join(dict.fromkeys(choices))


def choose(name: str, request: Request) -> Backend | None:
  """What `resolve` names; None for the reference."""
  return BACKENDS.get(resolve(name, request))


def _search(name, request):
  """(what runs a request, {what was tried before it: why that cannot}).

  "auto" tries the backends that are preferred on the platform, the latest
  registered first, then the others in the order of their registration.
  """
  if name not in names():
    raise ValueError(f"unknown backend={name!r}; known: {', '.join(names())}")

  candidates = [name]
  if name == "auto":
    latest_first = reversed(_PREFERRED.items())
    preferred = [x for x, on in latest_first if request.platform in on]
    # The first that was registered, plain XLA, runs every request.
    candidates = list(dict.fromkeys(preferred + list(BACKENDS)))

  reasons: dict[str, str] = {}
  for candidate in candidates:
    runs = dense if candidate == DENSE else BACKENDS[candidate]
    # Who names a backend gets it, even one to be avoided.
    reason = _AVOIDED.get(candidate) if name == "auto" else None
    reason = reason or runs.unsupported(request)
    if reason is None:
      return candidate, reasons
    reasons[candidate] = reason

  raise Unsupported(
    "; ".join(
      f"backend={candidate} cannot run this case: {reason}"
      for candidate, reason in reasons.items()
    )
  )


# "auto" tries later ones first: cuDNN before Triton, if it can run a request.
register("batched", xla.ON_ACCELERATORS)
register("streamed", xla.ON_CPUS, platforms=("cpu",))
register("triton", Triton(), platforms=("cuda",))
register("cudnn", Cudnn(), platforms=("cuda",))
register("mosaic", Mosaic(), platforms=("tpu",))
