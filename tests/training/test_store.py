"""Tests of checkpoints/store.py: what was saved is what is restored."""

import dataclasses
import random
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import runs

from sparse_transformer.data import files
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.step import State


@pytest.fixture(scope="module")
def state():
  """A small state with an optimizer; all values are distinct."""
  params = {
    "blocks": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.zeros((2, 4))},
    "position": {0: jnp.ones(3), 1: jnp.ones(5)},
    "start": jnp.ones(4),
  }
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1))
  zeros = State(jnp.int32(0), params, optimizer.init(params), params)
  rng = np.random.RandomState(0)

  def fill(x):
    # A copy: JAX may share the memory of NumPy arrays.
    return jnp.array(rng.randint(1, 99, x.shape) / 8, x.dtype)

  return dataclasses.replace(jax.tree.map(fill, zeros), step=jnp.int32(4))


def at(state, step):
  return dataclasses.replace(state, step=jnp.int32(step))


def save(workdir, state, *steps, keep=9):
  with store.Checkpoints(workdir, keep=keep) as checkpoints:
    for step in steps:
      checkpoints.save(at(state, step))


def restore(workdir, state, step=None):
  like = jax.eval_shape(lambda: state)
  with store.Checkpoints(workdir) as checkpoints:
    return checkpoints.restore(like, step)


def restore_last(workdir, state):
  like = jax.eval_shape(lambda: state)
  with store.Checkpoints(workdir, keep=9) as checkpoints:
    return checkpoints.restore_last(like)


def steps(workdir):
  with store.Checkpoints(workdir) as checkpoints:
    return checkpoints.steps()


def assert_same(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  for x, y in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# Saving and restoring.


def test_state_is_restored_bit_for_bit_with_its_types(tmp_path, state):
  odd = jnp.asarray([np.nan, np.inf, -0.0, 1e-45], jnp.float32)
  state = dataclasses.replace(state, ema={**state.ema, "start": odd})
  save(tmp_path, state, 4)
  found = restore(tmp_path, state)
  assert_same(found, state)
  assert isinstance(found.opt_state[1][0], optax.ScaleByAdamState)


def test_last_step_is_restored_unless_another_is_requested(tmp_path, state):
  save(tmp_path, state, 4, 8, 100)
  assert steps(tmp_path) == [4, 8, 100]
  assert restore(tmp_path, state).step == 100
  assert restore(tmp_path, state, 8).step == 8
  with pytest.raises(ValueError, match="no checkpoint of step 9 .* 4, 8, 100"):
    restore(tmp_path, state, 9)


def test_only_the_last_checkpoints_and_the_best_are_kept(tmp_path, state):
  with store.Checkpoints(tmp_path, keep=2, keep_best=1) as checkpoints:
    for step, bits in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
      checkpoints.save(at(state, step), bits)
    checkpoints.finish()
    assert checkpoints.steps() == [2, 4, 5]


def test_training_goes_on_while_a_checkpoint_is_written(
  tmp_path, state, monkeypatch
):
  """Later steps, which reuse the memory of the arrays, change nothing in it."""
  crc32, later = files.crc32, threading.Event()

  def wait(path):
    assert later.wait(60)
    return crc32(path)

  monkeypatch.setattr(files, "crc32", wait)
  step = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)
  # A copy, as steps delete their arguments.
  state = jax.tree.map(jnp.copy, state)
  state = dataclasses.replace(state, params=jnp.arange(2.0**22))
  expected = jax.tree.map(np.array, state)
  with store.Checkpoints(tmp_path, keep=9) as checkpoints:
    checkpoints.save(state)
    for _ in range(4):
      state = jax.block_until_ready(step(state))
    assert checkpoints.steps() == []
    later.set()
    checkpoints.finish()
    assert checkpoints.steps() == [4]
  assert_same(restore(tmp_path, expected), expected)


def test_saved_step_is_not_saved_again(tmp_path, state):
  save(tmp_path, state, 4)
  changed = dataclasses.replace(
    state, ema=jax.tree.map(jnp.ones_like, state.ema)
  )
  save(tmp_path, changed, 4)
  assert_same(restore(tmp_path, state), state)


def test_other_files_and_folders_are_left_alone(tmp_path, state, capsys):
  save(tmp_path, state, 4)
  folder = tmp_path / "checkpoints"
  for name in ("notes.txt", "7", "5.orbax-checkpoint-tmp", "abc/x", "8/notes"):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(name)
  for name in ("9", "007", "-4", "1e3"):
    (folder / name).mkdir()
  before = runs.files(folder)
  assert_same(restore_last(tmp_path, state), state)
  assert steps(tmp_path) == [4]
  assert capsys.readouterr() == ("", "")
  assert runs.files(folder) == before
  # They give way to checkpoints.
  save(tmp_path, state, 7, 8, 9)
  assert steps(tmp_path) == [4, 7, 8, 9]
  lines = capsys.readouterr().err.splitlines()
  assert [line.removeprefix(f"{folder}/") for line in lines] == [
    f"{step} is not a checkpoint; renamed to other-{step}-0"
    for step in (7, 8, 9)
  ]
  assert (folder / "other-7-0").read_text() == "7"
  assert (folder / "other-8-0" / "notes").read_text() == "8/notes"


def test_killed_deletion_is_completed(tmp_path, state, monkeypatch, capsys):
  plain = shutil.rmtree

  def begin(path, *args, **kwargs):
    if not path.exists():
      return
    plain(next(path for path in path.rglob("*") if path.is_dir()))
    raise OSError("killed")

  with monkeypatch.context() as patch:
    patch.setattr(shutil, "rmtree", begin)
    save(tmp_path, state, 4, 8, 12, keep=2)
  assert steps(tmp_path) == [8, 12]
  assert_same(restore_last(tmp_path, state), at(state, 12))
  found = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  assert sorted(found) == ["12", "8"]
  assert capsys.readouterr() == ("", "")


def test_checkpoint_that_is_deleted_while_it_is_read(
  tmp_path, state, monkeypatch
):
  save(tmp_path, state, 4)
  crc32 = files.crc32

  def late(path):
    shutil.rmtree(tmp_path / "checkpoints" / "4", ignore_errors=True)
    return crc32(path)

  monkeypatch.setattr(files, "crc32", late)
  with pytest.raises(FileNotFoundError, match="4 has just been deleted"):
    restore(tmp_path, state)


def test_unfinished_checkpoint_is_ignored(tmp_path, state):
  save(tmp_path, state, 4)
  folder = tmp_path / "checkpoints"
  shutil.copytree(folder / "4", folder / "8.orbax-checkpoint-tmp")
  assert steps(tmp_path) == [4]
  # A run may be writing it: a reader does not delete it.
  assert (folder / "8.orbax-checkpoint-tmp" / "state").is_dir()
  save(tmp_path, state, 8)
  assert steps(tmp_path) == [4, 8]


def test_reading_writes_nothing(tmp_path, state):
  with pytest.raises(FileNotFoundError, match="holds no checkpoint; train.py"):
    restore(tmp_path / "none", state)
  assert not any(tmp_path.iterdir())


def test_state_of_another_network_is_an_error(tmp_path, state):
  save(tmp_path, state, 4)
  wide = dataclasses.replace(state, ema={**state.ema, "start": jnp.ones(7)})
  with pytest.raises(ValueError, match="another network: .* ema.start differ"):
    restore_last(tmp_path, wide)
  more = dataclasses.replace(state, ema={**state.ema, "end": jnp.ones(7)})
  with pytest.raises(ValueError, match="another network: .* ema.end differ"):
    restore_last(tmp_path, more)
  assert steps(tmp_path) == [4]


@pytest.mark.parametrize("there, here", [([], [8]), ([8, 16], [8, 12])])
def test_checkpoint_with_other_centroids_is_rejected(
  there, here, tmp_path, state
):
  def routing(clusters):
    if not clusters:
      return state
    arrays = {str(c): jnp.ones((2, 3, c, 4)) for c in clusters}
    return dataclasses.replace(state, ema={**state.ema, "centroids": arrays})

  save(tmp_path, routing(there), 4)
  with pytest.raises(ValueError, match="centroids.*differ.*use the settings"):
    restore_last(tmp_path, routing(here))


# Damage.


def files_of(workdir, step):
  folder = workdir / "checkpoints" / str(step)
  return {
    str(path.relative_to(folder)): path
    for path in folder.rglob("*")
    if path.is_file()
  }


def flip(content, place):
  return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


RNG = random.Random(0)
DAMAGES = {
  "cut": lambda content: content[: RNG.randrange(len(content))],
  "flipped": lambda content: flip(content, RNG.randrange(len(content))),
  "deleted": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_the_checkpoint_before_it_is_used(
  damage, tmp_path, state, capsys
):
  save(tmp_path, state, 4, 8)
  step = tmp_path / "checkpoints" / "8"
  for name, file in files_of(tmp_path, 8).items():
    content = file.read_bytes()
    if damage == "deleted":
      file.unlink()
    elif content:
      file.write_bytes(DAMAGES[damage](content))
    else:
      continue
    capsys.readouterr()
    found = restore_last(tmp_path, state)
    reported = capsys.readouterr().err
    assert_same(found, at(state, 4))
    assert f"{step} cannot be used" in reported and reported.count("\n") == 1
    # A damaged list may name another file.
    assert name in reported or name == store.FILES
    (tmp_path / "checkpoints" / "damaged-8-0").rename(step)
    file.write_bytes(content)
  assert_same(restore(tmp_path, state), at(state, 8))


def test_complete_checkpoint_that_orbax_cannot_read_is_kept(
  tmp_path, state, monkeypatch
):
  """This happens after an upgrade, for example, or when memory runs out."""
  save(tmp_path, state, 4)

  def fail(*_, **__):
    raise RuntimeError("unknown format\nmore")

  with monkeypatch.context() as patch:
    patch.setattr("orbax.checkpoint.Checkpointer.restore", fail)
    with pytest.raises(ValueError, match="is complete, but .*format$"):
      restore_last(tmp_path, state)
  assert restore_last(tmp_path, state).step == 4
