"""The registry of backends, and the choice of a backend for a request."""

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

DENSE = "dense"  # the reference: it has no plans and is not registered
PLAIN = DENSE, "batched", "streamed"  # backends without kernels

BACKENDS: dict[str, Backend] = {}
# The platforms that prefer each backend.
_PREFERRED: dict[str, Sequence[str]] = {}
_AVOIDED: dict[str, str] = {}  # see `avoid`


def register(
  name: str, backend: Backend, platforms: Sequence[str] = ()
) -> None:
  """Adds a backend, so that `attend` and configs can select it by name.

  Args:
    name: the name of the backend.
    backend: the backend. It must be hashable, because it is part of the key
      under which programs are cached.
    platforms: names from `PLATFORMS`. On these platforms, "auto" tries this
      backend before all backends that were registered earlier. On other
      platforms, "auto" tries it after them.

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
  """Returns all valid values of `attention.backend`."""
  return "auto", DENSE, *BACKENDS


def avoid(reasons: Mapping[str, str]) -> None:
  """Sets the backends that "auto" must not choose from now on.

  Programs that are already compiled keep their backends.

  Args:
    reasons: {name: why it is avoided}. They replace the reasons of earlier
      calls.
  """
  _AVOIDED.clear()
  _AVOIDED.update(reasons)


def avoided() -> dict[str, str]:
  """Returns the reasons that `avoid` has set."""
  return dict(_AVOIDED)


def resolve(name: str, request: Request) -> str:
  """Returns the name of the backend that runs a request on its platform.

  Raises:
    ValueError: the backend is unknown.
    Unsupported: the backend cannot run this request; the message says why.
  """
  found, _ = _search(name, request)
  return found


def explain_choice(name: str, *requests: Request) -> str:
  """Explains which backend runs requests, and why preferred ones do not.

  Args:
    name: the name of a backend, as in `attend`.
    *requests: the requests of a program, such as one for each kind of layer.

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
  """Returns the backend that `resolve` names, or None for "dense"."""
  return BACKENDS.get(resolve(name, request))


def _search(name, request):
  """Returns (chosen backend, {rejected backend: why it was rejected}).

  "auto" first tries the backends that the platform prefers, the latest
  registered first. It then tries the others in the order of their registration.
  """
  if name not in names():
    raise ValueError(f"unknown backend={name!r}; known: {', '.join(names())}")

  candidates = [name]
  if name == "auto":
    latest_first = reversed(_PREFERRED.items())
    preferred = [x for x, on in latest_first if request.platform in on]
    # The search always succeeds, because "batched" runs every request.
    candidates = list(dict.fromkeys(preferred + list(BACKENDS)))

  reasons: dict[str, str] = {}
  for candidate in candidates:
    runs = dense if candidate == DENSE else BACKENDS[candidate]
    # A backend that is named explicitly is used even if it is to be avoided.
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


# "auto" tries later backends first, so cuDNN comes before Triton.
register("batched", xla.ON_ACCELERATORS)
register("streamed", xla.ON_CPUS, platforms=("cpu",))
register("triton", Triton(), platforms=("cuda",))
register("cudnn", Cudnn(), platforms=("cuda",))
register("mosaic", Mosaic(), platforms=("tpu",))
