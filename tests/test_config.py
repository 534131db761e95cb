"""Tests of config.py: defaults, reading, writing, comparing configs."""

import json
import re

import pytest
import runs

from sparse_transformer import config as config_lib, schema


def test_config_is_read_with_the_types_it_was_written_with(tmp_path):
  cycle, fractions = (1, 0), (0.5, 0.3, 0.2)
  config = runs.tiny(**{"attention.cycle": cycle, "data.fractions": fractions})
  config_lib.write_config(tmp_path / "a" / "b", config)
  found = config_lib.read_config(tmp_path / "a" / "b")
  assert found.to_dict() == config.to_dict()
  assert found.attention.cycle == (1, 0)
  with pytest.raises(AttributeError):
    found.attention.pattern = "fixed"
  values = schema.flatten(found)
  for name, value in schema.flatten(config).items():
    assert type(values[name]) is type(value), name


def test_config_of_an_earlier_version_is_read_if_it_means_the_same(tmp_path):
  config_lib.write_config(tmp_path, runs.tiny())
  path = tmp_path / "config.json"
  settings = json.loads(path.read_text())
  del settings["mesh"]["tensor"], settings["loss"]
  settings["data"]["field"] = "text"
  path.write_text(json.dumps(settings))
  assert config_lib.read_config(tmp_path).to_dict() == runs.tiny().to_dict()
  settings["data"]["field"] = "body"
  path.write_text(json.dumps(settings))
  with pytest.raises(ValueError, match="config.json .* no field data.field"):
    config_lib.read_config(tmp_path)


def another(name, value):
  """Another value that a field may have, too."""
  rule = schema.FIELDS[name].metadata["rule"]
  known = re.findall(r"\w+", rule.text.removeprefix("one of "))
  if rule.accepts(known[-1]):
    return known[known[0] == value]
  if isinstance(value, bool):
    return not value
  return {str: "x", tuple: (1, 1, 1)}.get(type(value)) or max(value, 0) + 1


def test_exactly_the_free_fields_may_change(tmp_path):
  config_lib.write_config(tmp_path, runs.tiny())
  written = (tmp_path / "config.json").read_bytes()
  for group, fields in runs.tiny().items():
    for field, value in fields.items():
      name = f"{group}.{field}"
      changed = runs.tiny(**{name: another(name, value)})
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
