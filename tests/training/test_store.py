"""Tests of checkpoints/store.py: what was saved is what is restored."""

import dataclasses
import json
import random
import resource
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import runs
from helpers.errors import refused

from sparse_transformer import atomic
from sparse_transformer.data import files
from sparse_transformer.training.checkpoints import store
from sparse_transformer.training.step import State


@pytest.fixture(scope="module")
def state():
  """A small state with an optimizer; all values are distinct."""
  params = {
    "blocks": {
      "kernel": jnp.ones((2, 3, 4)),
      "bias": jnp.zeros((2, 4)),
    },
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
  with store.Saver(workdir, keep=keep) as saver:
    for step in steps:
      saver.save(at(state, step))


def restore(workdir, state, step=None):
  return store.Saved(workdir).restore(jax.eval_shape(lambda: state), step)


def restore_last(workdir, state):
  like = jax.eval_shape(lambda: state)
  with store.Saver(workdir, keep=9) as saver:
    return saver.saved.restore(like, saver.set_damaged_aside())


def steps(workdir):
  return store.Saved(workdir).steps()


def names(workdir):
  return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def assert_same(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  assert runs.arrays(tree) == runs.arrays(other)


# Saving and restoring.


def test_state_is_restored_bit_for_bit_with_its_types(tmp_path, state):
  odd = jnp.asarray([np.nan, np.inf, -0.0, 1e-45], jnp.float32)
  state = dataclasses.replace(state, ema=state.ema | {"start": odd})
  save(tmp_path, state, 4)
  found = restore(tmp_path, state)
  assert_same(found, state)
  assert isinstance(found.opt_state[1][0], optax.ScaleByAdamState)


def test_last_step_is_restored_unless_another_is_requested(tmp_path, state):
  with pytest.raises(FileNotFoundError, match="no checkpoint in .*: none$"):
    restore(tmp_path / "none", state)
  assert not any(tmp_path.iterdir())
  save(tmp_path, state, 4, 8, 100)
  assert steps(tmp_path) == [4, 8, 100]
  assert restore(tmp_path, state).step == 100
  assert restore(tmp_path, state, 8).step == 8
  with pytest.raises(FileNotFoundError, match="of step 9 .*: 4, 8, 100$"):
    restore(tmp_path, state, 9)

  changed = jax.tree.map(jnp.ones_like, state)
  save(tmp_path, changed, 8)  # a saved step is not saved again

  assert_same(restore(tmp_path, state, 8), at(state, 8))


def test_only_the_last_checkpoints_and_the_best_are_kept(tmp_path, state):
  def save(keep, *validated):
    with store.Saver(tmp_path, keep=keep) as saver:
      for step, bits in validated:
        saver.save(at(state, step), bits)

  save(2, (1, 3.0), (2, 1.0), (3, 2.0))
  save(2, (4, None), (5, 1.5))  # resumed
  assert names(tmp_path) == ["2", "4", "5"]
  assert store.Saved(tmp_path).find("best") == 2
  save(1, (6, 0.5))
  assert names(tmp_path) == ["6"]


def test_training_goes_on_while_a_checkpoint_is_written(
  tmp_path, state, monkeypatch
):
  """Later steps, which reuse the memory of the arrays, change nothing in it."""
  crc32 = files.crc32
  later = threading.Event()

  def wait(path):
    assert later.wait(1200)
    return crc32(path)

  monkeypatch.setattr(files, "crc32", wait)
  step = jax.jit(lambda x: jax.tree.map(lambda x: x + 1, x), donate_argnums=0)
  # A copy, as steps delete their arguments.
  state = jax.tree.map(jnp.copy, state)
  state = dataclasses.replace(state, params=jnp.arange(2.0**22))
  expected = jax.tree.map(np.array, state)
  with store.Saver(tmp_path, keep=9) as saver:
    saver.save(state)
    for _ in range(4):
      state = jax.block_until_ready(step(state))
    assert saver.saved.steps() == []  # it gets its name with its list
    later.set()
    saver.finish()
    assert saver.saved.steps() == [4]
  assert_same(restore(tmp_path, expected), expected)


@pytest.mark.parametrize(
  "owner, name",
  [
    (files, "crc32"),
    (atomic, "write_json"),
  ],
)
def test_older_checkpoints_stay_until_the_new_one_is_complete(
  owner, name, tmp_path, state, monkeypatch
):
  save(tmp_path, state, 4)

  def fail(*_, **__):
    raise OSError("no space\nleft")

  with monkeypatch.context() as patch:
    patch.setattr(owner, name, fail)
    with pytest.raises(OSError, match=r"no space; saved steps: \[4\]$"):
      save(tmp_path, state, 8, keep=1)

  assert names(tmp_path) == ["4"]
  assert_same(restore_last(tmp_path, state), state)
  save(tmp_path, state, 8, keep=1)
  assert names(tmp_path) == ["8"]


def test_what_a_killed_run_was_writing_or_deleting_is_removed(
  tmp_path, state, capsys
):
  save(tmp_path, state, 4)
  folder = tmp_path / "checkpoints"
  before = runs.files(folder)
  for name in (f"8{store.TEMPORARY}", f"old{store.TEMPORARY}/2"):
    shutil.copytree(folder / "4", folder / name)

  assert steps(tmp_path) == [4]
  assert (folder / f"8{store.TEMPORARY}").is_dir()  # a run may be writing it
  assert_same(restore_last(tmp_path, state), state)
  assert runs.files(folder) == before
  assert capsys.readouterr() == ("", "")


def test_other_files_and_folders_are_left_alone(tmp_path, state, capsys):
  save(tmp_path, state, 4)
  folder = tmp_path / "checkpoints"
  for name in ("notes.txt", "7", "abc/x", "8/notes", "6/notes"):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(name)
  for name in ("9", "007", "-4", "1e3"):
    (folder / name).mkdir()
  others = {*names(tmp_path)} - {"4"}

  assert_same(restore_last(tmp_path, state), state)
  save(tmp_path, state, 5, keep=1)
  for step in (7, 8, 9):  # even where a checkpoint would be
    words = r"move or rename it; saved steps: \[5\]$"
    with pytest.raises(OSError, match=words):
      save(tmp_path, state, step)

  assert steps(tmp_path) == [5]
  assert {*names(tmp_path)} == others | {"5"}
  assert (folder / "7").read_text() == "7"
  assert (folder / "8" / "notes").read_text() == "8/notes"
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

  with pytest.raises(FileNotFoundError, match="just deleted checkpoint .*4$"):
    restore(tmp_path, state)


@pytest.mark.parametrize("what", ["state", "weights"])
@pytest.mark.parametrize(
  "part, error, message",
  [
    ("", FileNotFoundError, "a run has just deleted checkpoint .*4"),
    ("state", ValueError, "4 is damaged: "),
  ],
)
def test_checkpoint_that_is_lost_or_damaged_after_it_was_verified(
  part, error, message, what, tmp_path, state, monkeypatch
):
  """Both readers answer as if it had been so before."""
  save(tmp_path, state, 4)
  read = ocp.Checkpointer.restore

  def late(*args, **more):
    item = more["args"].item
    if len(item) > 1 or "ema" in item:
      shutil.rmtree(tmp_path / "checkpoints" / "4" / part)
    return read(*args, **more)

  monkeypatch.setattr(ocp.Checkpointer, "restore", late)
  with pytest.raises(error, match=message):
    if what == "state":
      restore(tmp_path, state)
    else:
      automatic = jax.sharding.AxisType.Auto
      mesh = jax.make_mesh((1,), ("data",), (automatic,))
      store.Saved(tmp_path).weights(4, mesh)


def test_what_describes_a_checkpoint_is_not_read_if_it_is_damaged(
  tmp_path, state
):
  with store.Saver(tmp_path, keep=9) as saver:
    saver.save(at(state, 4), 2.0)
    saver.save(at(state, 8), 3.0)
  assert saver.saved.describe(8)["validation"] == 3.0
  path = tmp_path / "checkpoints" / "8" / "about" / "metadata"
  path.write_bytes(path.read_bytes().replace(b"3.0", b"1.0"))
  assert saver.saved.describe(8) == {}
  assert saver.saved.find("best") == 4


@pytest.mark.parametrize(
  "more, name",
  [
    ({"end": 1.0}, "ema.end"),
    ({"start": jnp.ones(7)}, "ema.start"),
    ({"centroids": {"8": jnp.ones((2, 3, 8, 4))}}, "centroids.8"),
  ],
)
def test_state_of_another_network_is_an_error(more, name, tmp_path, state):
  save(tmp_path, state, 4)
  other = dataclasses.replace(state, ema=state.ema | more)
  with refused(f"another network: .*{name}.*differ; use the model"):
    restore_last(tmp_path, other)
  assert steps(tmp_path) == [4]


def test_checkpoint_of_older_code_is_read_and_counts(tmp_path, state):
  """There, Orbax saw only the folder of arrays."""
  folder = tmp_path / "checkpoints" / "4"
  metadata = folder / "about" / "metadata"
  with ocp.StandardCheckpointer() as old:
    old.save(folder / "state", vars(state) | dict(loss_scale={}))
  metadata.parent.mkdir()
  metadata.write_text(json.dumps(dict(validation=1.0)))
  listed = {}
  for path in sorted(folder.rglob("*")):
    if path.is_file():
      listed[str(path.relative_to(folder))] = files.crc32(path)
  (folder / "files.json").write_text(json.dumps(listed))

  assert_same(restore_last(tmp_path, state), state)
  with store.Saver(tmp_path, keep=1) as saver:
    saver.save(at(state, 6), 3.0)
    saver.save(at(state, 8), 2.0)
  assert steps(tmp_path) == [4, 8]
  assert saver.saved.find("best") == 4


# Damage.


def flip(content, place):
  return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


# What is done to the bytes of a file, at some place.
DAMAGES = {
  "cut": lambda content, place: content[:place],
  "flipped": flip,
  "deleted": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_and_the_checkpoint_before_it_is_used(
  damage, tmp_path, state, capsys
):
  random_number = random.Random(0)
  save(tmp_path, state, 4, 8)
  step = tmp_path / "checkpoints" / "8"
  listed = json.loads((step / "files.json").read_text())
  names = [*listed, "files.json"]
  parts = {name.partition("/")[0] for name in names}
  assert parts == {"state", "about", "files.json"}

  for name in names:
    file = step / name
    content = file.read_bytes()
    if damage == "deleted":
      file.unlink()
    elif content:
      place = random_number.randrange(len(content))
      file.write_bytes(DAMAGES[damage](content, place))
    else:
      continue
    with refused("8 is damaged: .*; run train.py again"):
      restore(tmp_path, state)
    capsys.readouterr()
    assert_same(restore_last(tmp_path, state), at(state, 4))
    reported = capsys.readouterr().err
    assert f"{step} cannot be used" in reported
    assert reported.count("\n") == 1
    # A damaged list may name another file.
    assert name in reported or name == store.FILES
    (tmp_path / "checkpoints" / "damaged-8-0").rename(step)
    file.write_bytes(content)

  for path in step.iterdir():  # nothing else of it is read
    if path.is_file() and path.name != store.FILES:
      path.unlink()
  assert_same(restore_last(tmp_path, state), at(state, 8))


@pytest.mark.parametrize("read", ["steps", "damage"])
def test_checkpoint_that_cannot_be_opened_is_not_set_aside(
  read, tmp_path, state
):
  save(tmp_path, state, 4)
  before = runs.files(tmp_path)
  saved = store.Saved(tmp_path)
  limit = resource.RLIMIT_NOFILE
  soft, hard = resource.getrlimit(limit)
  try:  # those that are open stay so
    resource.setrlimit(limit, (3, hard))
    with pytest.raises(OSError, match="Too many open files"):
      if read == "steps":
        saved.steps()
      else:
        store._damage(tmp_path / "checkpoints" / "4")
  finally:
    resource.setrlimit(limit, (soft, hard))
  assert runs.files(tmp_path) == before
  assert saved.steps() == [4]


def test_complete_checkpoint_that_orbax_cannot_read_is_kept(
  tmp_path, state, monkeypatch
):
  """This happens after an upgrade, for example, or when memory runs out."""
  save(tmp_path, state, 4)

  def fail(*_, **__):
    raise RuntimeError("unknown format\nmore")

  with monkeypatch.context() as patch:
    patch.setattr("orbax.checkpoint.Checkpointer.restore", fail)
    with refused("is complete, but .*format$"):
      restore_last(tmp_path, state)

  assert restore_last(tmp_path, state).step == 4
