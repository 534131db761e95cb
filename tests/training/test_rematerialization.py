"""Tests of `model.remat=auto`: what it chooses, and that a run keeps it."""

import os
import signal
from types import SimpleNamespace

import jax
import pytest
from helpers import runs

from sparse_transformer import machine, signals
from sparse_transformer.training import loop, rematerialization
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.distributed import processes
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.stopwatch import Stopwatch

GIB = 2**30
# What each program needs besides the state, in GiB.
NEEDS = {"none": 50, "block_but_attention": 20, "block": 10}
TOO_LARGE = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory")


@pytest.fixture
def compiled(monkeypatch):
  """The settings that were compiled; programs have the sizes of `NEEDS`."""
  found = []

  def compile_step(experiment, remat, dtype):
    found.append(remat)
    memory = SimpleNamespace(
      temp_size_in_bytes=NEEDS[remat] * GIB,
      output_size_in_bytes=3 * GIB,
      alias_size_in_bytes=3 * GIB,  # the state
    )
    return SimpleNamespace(memory_analysis=lambda: memory)

  monkeypatch.setattr(Experiment, "compile_step", compile_step)
  monkeypatch.setattr(rematerialization, "stored", lambda *args: 0)
  return found


def choose(monkeypatch, free, remat="auto", **options):
  """What is chosen when so many GiB are free; None for unknown."""
  size = None if free is None else free * GIB
  monkeypatch.setattr(machine, "free_memory", lambda: size)
  experiment = Experiment(runs.tiny(**{"model.remat": remat}))
  return rematerialization.choose(experiment, **options)


# What is chosen.


@pytest.mark.parametrize(
  "free, expected",
  [
    (63, ["none"]),
    (61, ["none", "block_but_attention"]),  # some memory has to be left
    (26, ["none", "block_but_attention"]),
    (24, ["none", "block_but_attention", "block"]),
    (1, ["none", "block_but_attention", "block"]),
    (None, ["block"]),
  ],
)
def test_first_program_that_fits_is_chosen(
  free, expected, compiled, monkeypatch
):
  chosen = choose(monkeypatch, free)
  assert compiled == expected
  assert chosen.remat == expected[-1]
  assert chosen.why.startswith(f"model.remat={chosen.remat}: ")
  for remat in expected:
    assert f"{remat} needs {NEEDS[remat]}.00 GiB" in chosen.why
  assert chosen.why.endswith(f"{free}.00 GiB is free") or free is None


@pytest.mark.parametrize("free, expected", [(49, 1), (51, 0)])
def test_program_whose_stored_arrays_do_not_fit_is_not_compiled(
  free, expected, compiled, monkeypatch
):
  stored = {"none": 40 * GIB, "block_but_attention": 4 * GIB}
  monkeypatch.setattr(
    rematerialization, "stored", lambda experiment, remat, dtype: stored[remat]
  )
  chosen = choose(monkeypatch, free)
  assert compiled == [*NEEDS][expected:2]
  assert ("none needs at least 40.00 GiB, block" in chosen.why) == expected


@pytest.mark.parametrize("num_devices", [1, 4])
def test_stored_arrays_are_less_than_what_a_program_needs(num_devices):
  fields = {"model.num_layers": 8, "train.batch_size": 8}
  experiment = Experiment(runs.tiny(**fields), jax.devices()[:num_devices])
  sizes = []
  for remat in NEEDS:
    sizes.append(rematerialization.stored(experiment, remat))
    program = experiment.compile_step(remat)
    assert sizes[-1] < rematerialization.needed(program)
  # They are most of it if nothing is recomputed.
  program = experiment.compile_step("none")
  assert sizes[0] > rematerialization.needed(program) / 2
  assert sizes == sorted(sizes, reverse=True)


def test_state_that_is_not_there_yet_takes_memory(compiled, monkeypatch):
  assert choose(monkeypatch, 63, state=2 * GIB).remat == "block_but_attention"


@pytest.mark.parametrize("remat", NEEDS)
def test_config_decides_whatever_is_free(remat, compiled, monkeypatch):
  chosen = choose(monkeypatch, 1, remat, kept="block_but_attention")
  assert chosen.remat == remat
  assert compiled == [remat]
  assert not chosen.why


@pytest.mark.parametrize("remat", NEEDS)
def test_earlier_choice_is_kept_whatever_is_free(remat, compiled, monkeypatch):
  chosen = choose(monkeypatch, 1, kept=remat)
  assert chosen.remat == remat
  assert compiled == [remat]
  assert "this run chose it before" in chosen.why


def test_processes_choose_what_fits_in_all(compiled, monkeypatch):
  # The second process has less memory.
  gather = processes.gather
  monkeypatch.setattr(
    processes,
    "gather",
    lambda value: gather(value) + [False] * (value is True),
  )
  assert choose(monkeypatch, 100).remat == "block"


def test_program_that_the_compiler_rejects_as_too_large_is_not_chosen(
  compiled, monkeypatch
):
  compile_step = Experiment.compile_step

  def reject(experiment, remat, dtype):
    program = compile_step(experiment, remat, dtype)
    if remat in rejected:
      raise TOO_LARGE
    return program

  monkeypatch.setattr(Experiment, "compile_step", reject)
  rejected = {"none"}
  assert choose(monkeypatch, 100).remat == "block_but_attention"
  assert "none needs too much" in choose(monkeypatch, 100).why
  rejected = set(NEEDS)
  with pytest.raises(type(TOO_LARGE), match="RESOURCE_EXHAUSTED"):
    choose(monkeypatch, 100)


def test_other_errors_of_the_compiler_are_raised(monkeypatch):
  def fail(experiment, remat, dtype):
    raise jax.errors.JaxRuntimeError("INTERNAL: why")

  monkeypatch.setattr(Experiment, "compile_step", fail)
  with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
    choose(monkeypatch, 100)


# What a run keeps.


def needs(remat):
  """Bytes that the step of `runs.tiny` needs."""
  experiment = Experiment(runs.tiny())
  dtype = experiment.examples[0].dtype
  return rematerialization.needed(experiment.compile_step(remat, dtype))


def stop_at(step, monkeypatch):
  """A signal comes at a step of the next run."""
  count = Stopwatch.count
  counted = []

  def stop(watch, tokens):
    count(watch, tokens)
    counted.append(tokens)
    if len(counted) == step:
      os.kill(os.getpid(), signal.SIGTERM)

  monkeypatch.setattr(Stopwatch, "count", stop)


@pytest.mark.parametrize("is_same", [True, False])
def test_choice_is_kept_on_the_same_machine(
  is_same, tmp_path, monkeypatch, capsys
):
  whole = loop.train(runs.tiny(), tmp_path / "whole")
  part = tmp_path / "part"
  with monkeypatch.context() as patch:
    stop_at(2, patch)
    with pytest.raises(signals.Stopped, match="at step 2"):
      loop.train(runs.tiny(), part)
  assert store.Saved(part).describe(2)["remat"] == "none"

  # It still fits, but would not be chosen now.
  free = int(0.99 * needs("none") / rematerialization.SHARE)
  monkeypatch.setattr(machine, "free_memory", lambda: free)
  if not is_same:
    monkeypatch.setattr(machine, "machine", lambda: "another")
  capsys.readouterr()
  resumed = loop.train(runs.tiny(), part)

  out = capsys.readouterr().out
  remat = store.Saved(part).describe(4)["remat"]
  if is_same:
    assert "model.remat=none: this run chose it before" in out
    assert remat == "none"
    assert runs.arrays(resumed) == runs.arrays(whole)
  else:
    assert f"model.remat={remat}: none needs" in out
    assert remat != "none"


def test_config_of_the_resumed_run_decides(tmp_path, capsys):
  loop.train(runs.tiny(**{"train.steps": 2, "model.remat": "block"}), tmp_path)
  longer = {"train.steps": 3}
  for remat, expected in ("auto", "none"), ("block", "block"):
    config = runs.tiny(**longer, **{"model.remat": remat})
    loop.train(config, tmp_path, allow_changes=True)
    step = longer["train.steps"]
    assert store.Saved(tmp_path).describe(step)["remat"] == expected
    longer["train.steps"] += 1
