"""Tests of sparse_transformer/checkpoint.py: what is restored was saved."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from sparse_transformer.training import checkpoint, step as training


@pytest.fixture
def state(tiny):
  """A small state with the optimizer of a run, no two values alike."""
  params = {
    "blocks": {"kernel": jnp.ones((2, 3, 4)), "bias": jnp.zeros((2, 4))},
    "position": {0: jnp.ones(3), 1: jnp.ones(5)},
    "start": jnp.ones(4),
  }
  optimizer = training.make_optimizer(tiny())
  zeros = training.State(
    jnp.zeros((), jnp.int32), params, optimizer.init(params), params
  )
  random = np.random.RandomState(0)

  def fill(x):
    # A copy: jax may share the memory of NumPy's arrays.
    return jnp.array(random.randint(1, 99, x.shape) / 8, x.dtype)

  return dataclasses.replace(jax.tree.map(fill, zeros), step=jnp.int32(4))


def at(state, step):
  return dataclasses.replace(state, step=jnp.int32(step))


def save(workdir, state, *steps, keep=9):
  with checkpoint.Checkpoints(workdir, keep=keep) as checkpoints:
    for step in steps:
      checkpoints.save(at(state, step))


def restore(workdir, state, step=None):
  like = jax.eval_shape(lambda: state)
  with checkpoint.Checkpoints(workdir) as checkpoints:
    return checkpoints.restore(like, step)


def steps(workdir):
  with checkpoint.Checkpoints(workdir) as checkpoints:
    return checkpoints.steps()


def assert_same(tree, other):
  assert jax.tree.structure(tree) == jax.tree.structure(other)
  for x, y in zip(*map(jax.tree.leaves, (tree, other)), strict=True):
    assert x.dtype == y.dtype
    assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


# States.


def test_state_comes_back_bit_by_bit_with_its_types(tmp_path, state):
  odd = jnp.asarray([np.nan, np.inf, -0.0, 1e-45], jnp.float32)
  state = dataclasses.replace(state, ema={**state.ema, "start": odd})
  save(tmp_path, state, 4)
  found = restore(tmp_path, state)
  assert_same(found, state)
  assert isinstance(found.opt_state[1][0], optax.ScaleByAdamState)


def test_last_step_is_restored_unless_another_is_asked_for(tmp_path, state):
  save(tmp_path, state, 4, 8, 100)
  assert steps(tmp_path) == [4, 8, 100]
  assert restore(tmp_path, state).step == 100
  assert restore(tmp_path, state, 8).step == 8
  with pytest.raises(ValueError, match="no checkpoint of step 9 .* 4, 8, 100"):
    restore(tmp_path, state, 9)


def test_only_the_last_ones_are_kept(tmp_path, state):
  save(tmp_path, state, 1, 2, 3, 4, keep=2)
  assert steps(tmp_path) == [3, 4]


def test_step_that_is_there_is_not_saved_again(tmp_path, state):
  save(tmp_path, state, 4)
  changed = dataclasses.replace(state, ema=state.params)
  save(tmp_path, changed, 4)
  assert_same(restore(tmp_path, state), state)


def test_empty_folder_is_not_a_step_and_hides_none(tmp_path, state):
  save(tmp_path, state, 4, 8)
  (tmp_path / "checkpoints" / "12").mkdir()
  assert steps(tmp_path) == [4, 8]
  assert restore(tmp_path, state).step == 8
  save(tmp_path, state, 10, 12)
  assert steps(tmp_path) == [4, 8, 10, 12]


def test_folder_that_is_no_checkpoint_is_not_written_over(tmp_path, state):
  save(tmp_path, state, 4)
  (tmp_path / "checkpoints" / "8").mkdir()
  (tmp_path / "checkpoints" / "8" / "notes").write_text("mine")
  assert steps(tmp_path) == [4]
  save(tmp_path, state, 8)
  assert steps(tmp_path) == [4, 8]
  aside = tmp_path / "checkpoints" / "damaged-8-0"
  assert (aside / "notes").read_text() == "mine"


def test_unfinished_checkpoint_is_not_a_step(tmp_path, state):
  save(tmp_path, state, 4)
  folder = tmp_path / "checkpoints"
  shutil.copytree(folder / "4", folder / "8.orbax-checkpoint-tmp")
  assert steps(tmp_path) == [4]
  # It may be one that a run beside is writing: readers leave it alone.
  assert (folder / "8.orbax-checkpoint-tmp" / "state").is_dir()
  save(tmp_path, state, 8)
  assert steps(tmp_path) == [4, 8]


def test_reading_writes_nothing(tmp_path, state):
  with pytest.raises(FileNotFoundError, match="holds no checkpoint; train.py"):
    restore(tmp_path / "none", state)
  assert not any(tmp_path.iterdir())


def test_state_of_another_network_is_refused(tmp_path, state):
  save(tmp_path, state, 4)
  wide = dataclasses.replace(state, ema={**state.ema, "start": jnp.ones(7)})
  with pytest.raises(ValueError, match="another network: .* ema.start differ"):
    restore(tmp_path, wide)
  more = dataclasses.replace(state, ema={**state.ema, "end": jnp.ones(7)})
  with pytest.raises(ValueError, match="another network: .* ema.end differ"):
    restore(tmp_path, more)


DAMAGES = {
  "cut": lambda content: content[: len(content) // 2],
  "emptied": lambda content: b"",
  "first byte": lambda content: bytes([content[0] ^ 255]) + content[1:],
  "middle": lambda content: (
    content[: len(content) // 2]
    + bytes([content[len(content) // 2] ^ 1])
    + content[len(content) // 2 + 1 :]
  ),
  "zeros": lambda content: bytes(len(content)),
  "deleted": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_found_or_harmless(tmp_path, state, damage):
  save(tmp_path, state, 4)
  files = [f for f in tmp_path.rglob("*") if f.is_file()]
  found = set()
  for file in files:
    content = file.read_bytes()
    if not content:
      continue
    if damage == "deleted":
      file.unlink()
    else:
      file.write_bytes(DAMAGES[damage](content))
    try:
      assert_same(restore(tmp_path, state), state)
    except ValueError as error:
      found.add(file)
      assert f"{tmp_path / 'checkpoints' / '4'} " in str(error)
      assert "\n" not in str(error)
    file.write_bytes(content)
  assert_same(restore(tmp_path, state), state)
  assert any(file.parents[1].name == "state" for file in found)


def test_flipped_byte_of_an_array_is_named(tmp_path, state):
  save(tmp_path, state, 4)
  like = jax.eval_shape(lambda: state)
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    manager = checkpoints._manager
    plain = manager.restore

    def damaged(*args, **kwargs):
      # What Orbax does with a flipped byte: another value, not a word.
      found = plain(*args, **kwargs)
      found["state"]["params"]["start"] = state.params["start"].at[2].add(1)
      return found

    manager.restore = damaged
    with pytest.raises(ValueError, match=r"damaged arrays .*params.*start"):
      checkpoints.restore(like)


# Configs.


def test_config_comes_back_with_its_types(tmp_path, tiny):
  config = tiny({"attention.cycle": (1, 0), "data.fractions": (0.5, 0.3, 0.2)})
  checkpoint.write_config(tmp_path / "a" / "b", config)
  found = checkpoint.read_config(tmp_path / "a" / "b")
  assert found.to_dict() == config.to_dict()
  assert found.attention.cycle == (1, 0)
  assert type(found.attention.cycle) is tuple
  assert found.is_locked
  with pytest.raises(AttributeError):
    found.attention.patern = "fixed"
  for group, fields in config.items():
    for name, value in fields.items():
      assert type(found[group][name]) is type(value), name


def test_same_config_is_accepted_and_another_refused(tmp_path, tiny):
  checkpoint.write_config(tmp_path, tiny())
  checkpoint.write_config(tmp_path, tiny())
  before = (tmp_path / "config.json").read_bytes()
  other = tiny({"model.width": 32, "data.fractions": (0.5, 0.25, 0.25)})
  with pytest.raises(ValueError, match="another config") as raised:
    checkpoint.write_config(tmp_path, other)
  assert "now), model.width (16 there, 32 now)" in str(raised.value)
  assert "data.fractions ([0.9, 0.05, 0.05] there" in str(raised.value)
  assert "another --workdir" in str(raised.value)
  assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.parametrize(
  "name, value",
  [
    ("data.path", "/elsewhere"),
    ("model.remat", "block"),
    ("attention.pattern", "fixed"),
    ("attention.cycle", (1, 0)),
    ("attention.backend", "dense"),
    ("attention.tile", 8),
    ("train.log_every", 7),
    ("eval.every", 7),
    ("eval.batch_size", 7),
    ("eval.sequences", 7),
    ("checkpoint.every", 7),
    ("checkpoint.keep", 7),
  ],
)
def test_field_that_changes_no_result_may_change(tmp_path, tiny, name, value):
  checkpoint.write_config(tmp_path, tiny())
  checkpoint.write_config(tmp_path, tiny({name: value}))
  group, field = name.split(".")
  assert checkpoint.read_config(tmp_path)[group][field] == value


def test_every_other_field_is_held(tmp_path, tiny):
  config = tiny()
  checkpoint.write_config(tmp_path, config)
  for group, fields in config.items():
    for field, value in fields.items():
      name = f"{group}.{field}"
      if name.startswith(checkpoint.FREE_FIELDS):
        continue
      other = {str: "x", tuple: (1, 1, 1)}.get(type(value))
      if other is None:
        other = not value if isinstance(value, bool) else value + 1
      with pytest.raises(ValueError, match=name):
        checkpoint.write_config(tmp_path, tiny({name: other}))


@pytest.mark.parametrize(
  "text", ["", "{", "[]", "5", "null", "{}", '{"data": {}}', "\0", '"model"']
)
def test_file_that_is_no_config_is_an_error(tmp_path, text):
  (tmp_path / "config.json").write_text(text)
  with pytest.raises(
    ValueError, match=f"{tmp_path}/config.json cannot be read"
  ):
    checkpoint.read_config(tmp_path)


@pytest.mark.parametrize("value", [5, "x", [1], None])
def test_group_that_is_no_group_is_an_error(tmp_path, tiny, value):
  settings = {**tiny().to_dict(), "model": value}
  (tmp_path / "config.json").write_text(json.dumps(settings))
  with pytest.raises(ValueError, match="config.json cannot be read"):
    checkpoint.read_config(tmp_path)


def test_folder_that_is_no_run_is_an_error(tmp_path):
  for folder in (tmp_path, tmp_path / "none"):
    with pytest.raises(FileNotFoundError, match=f"{folder} is no run"):
      checkpoint.read_config(folder)
  assert not any(tmp_path.iterdir())
