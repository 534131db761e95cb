"""Records of comparisons that nothing was trained for."""

from typing import Any

from sparse_transformer.comparison import record as record_lib


def run(choice: str, seed: int, bits: float, **changes: Any) -> record_lib.Run:
  """A run of a record: 4 validations in 40 steps, 10 seconds apart."""
  speed = {
    "dense": 1,
    "local": 2,
  }.get(choice, 3)
  found = dict(
    choice=choice,
    seed=seed,
    keys=8.5,
    receptive_field=16,
    sees={},
    steps=40,
    tokens_per_step=64,
    seconds=40 / speed,
    processor_seconds=80 / speed,
    parameters=100,
    peak_bytes=2**20 + seed,
    best_step=40,
    validation=dict(
      bits_per_dim=bits,
      standard_error=0.1,
      tokens=9,
    ),
    test=None,
    curve=dict(
      steps=[10, 20, 30, 40],
      seconds=[x / speed for x in (10, 20, 30, 40)],
      processor_seconds=[x / speed for x in (20, 40, 60, 80)],
      bits_per_dim=[bits + x for x in (3, 2, 1, 0)],
    ),
  )
  return found | changes


def record(*runs: record_lib.Run, **changes: Any) -> record_lib.Record:
  """A record of runs; changes are fields of `about`."""
  names = [*dict.fromkeys(run["choice"] for run in runs)]
  about = dict(
    field="attention.pattern",
    choices=names,
    seeds=len(runs) // len(names),
    first_seed=min(run["seed"] for run in runs),
    budget=("steps", 40),
    tune_budget=None,
    unit="bits/dim",
    config={"eval": {"sequences": 8}},
    command="python",
    commit=None,
  )
  return record_lib.make_record(about | changes, runs)
