"""The executors by name, and the choice of one for a case on a platform."""

import dataclasses
from typing import Any, NamedTuple

from sparse_transformer.attention.contract import Case, Executor, Unsupported
from sparse_transformer.attention.executors import dense, xla
from sparse_transformer.attention.executors.cudnn import Cudnn
from sparse_transformer.attention.executors.mosaic import Mosaic
from sparse_transformer.attention.executors.triton import Triton
from sparse_transformer.attention.platforms import (
  PLATFORMS,
  current_platform,
)
from sparse_transformer.patterns import Pattern, analysis


class Choice(NamedTuple):
  """What runs on a platform."""

  platform: str
  executor: Any  # an `Executor`, or `dense`


EXECUTORS: dict[str, Executor] = {}
_PREFERRED: dict[str, tuple[str, ...]] = {}  # on which "auto" prefers each
PLAIN = "dense", "batched", "streamed"  # which have no kernels
AVOIDED: dict[str, str] = {}  # what "auto" does not take, and why


def register(
  name: str, executor: Executor, platforms: tuple[str, ...] = ()
) -> None:
  """Adds an executor, which `attend` and the config can name.

  On these `PLATFORMS`, "auto" tries it before all earlier ones; on others,
  after them.
  """
  if name in backends():
    raise ValueError(f"backend {name!r} is already registered")
  if unknown := set(platforms) - set(PLATFORMS):
    raise ValueError(
      f"unknown platforms {sorted(unknown)}; known: {', '.join(PLATFORMS)}"
    )
  EXECUTORS[name], _PREFERRED[name] = executor, platforms


def unregister(name: str) -> None:
  """Removes an executor."""
  del EXECUTORS[name], _PREFERRED[name]


def backends() -> tuple[str, ...]:
  """All values that `attention.backend` may have."""
  return "auto", "dense", *EXECUTORS


def resolve(backend: str, case: Case) -> str:
  """Names what runs a case on its platform: "dense", or an executor.

  Raises a ValueError if the backend is unknown, and Unsupported, which says
  why, if it cannot run this case.
  """
  return _search(backend, case)[0]


def explain_choice(backend: str, *cases: Case) -> str:
  """`resolve` of cases, with the reason if it is not the first choice."""
  found = []
  for case in cases:
    name, reasons = _search(backend, case)
    others = (f"{other}: {reason}" for other, reason in reasons.items())
    found.append("; not ".join([name, *others]))
  return ", or ".join(dict.fromkeys(found))


def _search(backend, case):
  """(what runs a case, {what was tried before it: why that cannot})."""
  if backend not in backends():
    raise ValueError(f"unknown {backend=}; known: {', '.join(backends())}")
  names = [backend]
  if backend == "auto":
    latest_first = reversed(_PREFERRED.items())
    preferred = (name for name, on in latest_first if case.platform in on)
    names = [*dict.fromkeys([*preferred, *EXECUTORS])]
  reasons: dict[str, str] = {}
  for name in names:
    reason = AVOIDED.get(name) if backend == "auto" else None
    reason = reason or _executor(name).unsupported(case)
    if reason is None:
      return name, reasons
    reasons[name] = reason
  raise Unsupported(
    "; ".join(
      f"backend={name} cannot run this case: {reason}"
      for name, reason in reasons.items()
    )
  )


def _executor(name):
  return dense if name == "dense" else EXECUTORS[name]


def choose(backend: str, case: Case) -> Choice:
  """What runs a case where the program is traced; raises as `resolve` does."""
  platform = current_platform()
  name = resolve(backend, dataclasses.replace(case, platform=platform))
  return Choice(platform, _executor(name))


def tiling(backend: str, case: Case, part: Pattern) -> tuple[str, int, int]:
  """(what runs one part of a pattern, the side of its tiles, their number)."""
  name = resolve(backend, case)
  tile = _executor(name).tile_size(part, case)
  return name, tile, analysis.count_tiles(part, case.length, tile)


def common_tile(backend: str, case: Case, patterns: tuple[Pattern, ...]) -> int:
  """The tile that an executor chooses for all heads; 0 if parts differ."""
  executor = _executor(resolve(backend, case))
  choose = getattr(executor, "common_tile", None)
  return choose(patterns, case) if choose and patterns else 0


register("batched", xla.ON_ACCELERATORS)
register("streamed", xla.ON_CPUS, platforms=("cpu",))
register("triton", Triton(), platforms=("cuda",))
register("cudnn", Cudnn(), platforms=("cuda",))
register("mosaic", Mosaic(), platforms=("tpu",))
