"""Tests of config.py: defaults, reading, writing, comparing configs."""

import json

import pytest
import runs

from sparse_transformer import config as config_lib


def test_config_is_read_with_the_types_it_was_written_with(tmp_path):
  cycle, fractions = (1, 0), (0.5, 0.3, 0.2)
  config = runs.tiny(**{"attention.cycle": cycle, "data.fractions": fractions})
  config_lib.write_config(tmp_path / "a" / "b", config)
  found = config_lib.read_config(tmp_path / "a" / "b")
  assert found.to_dict() == config.to_dict()
  assert found.attention.cycle == (1, 0)
  assert found.is_locked
  with pytest.raises(AttributeError):
    found.attention.patern = "fixed"
  for group, fields in config.items():
    for name, value in fields.items():
      assert type(found[group][name]) is type(value), name


def test_what_an_old_config_lacks_has_its_default(tmp_path):
  config_lib.write_config(tmp_path, runs.tiny())
  path = tmp_path / "config.json"
  settings = json.loads(path.read_text())
  del settings["train"]["max_skipped"], settings["loss"]
  path.write_text(json.dumps(settings))
  assert config_lib.read_config(tmp_path).to_dict() == runs.tiny().to_dict()


def another(value):
  """Another value of the same type."""
  if isinstance(value, bool):
    return not value
  return {str: "x", tuple: (1, 1, 1)}.get(type(value)) or value + 1


def test_exactly_the_free_fields_may_change(tmp_path):
  config_lib.write_config(tmp_path, runs.tiny())
  written = (tmp_path / "config.json").read_bytes()
  for group, fields in runs.tiny().items():
    for field, value in fields.items():
      name = f"{group}.{field}"
      changed = runs.tiny(**{name: another(value)})
      if name.startswith(config_lib.FREE_FIELDS):
        config_lib.write_config(tmp_path, changed)
        found = config_lib.read_config(tmp_path)
        assert found.to_dict() == changed.to_dict()
        config_lib.write_config(tmp_path, runs.tiny())
      else:
        with pytest.raises(ValueError, match=f"another config: {name} "):
          config_lib.write_config(tmp_path, changed)
      assert (tmp_path / "config.json").read_bytes() == written


def test_error_lists_all_fields_that_differ_with_both_values(tmp_path):
  config_lib.write_config(tmp_path, runs.tiny())
  fractions = (0.5, 0.25, 0.25)
  other = runs.tiny(**{"model.width": 32, "data.fractions": fractions})
  with pytest.raises(ValueError, match="use another --workdir") as error:
    config_lib.check_config(tmp_path, other)
  assert "now), model.width (16 there, 32 now)" in str(error.value)
  assert "data.fractions ((0.9, 0.05, 0.05) there" in str(error.value)
