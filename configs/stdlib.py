"""Python source of the interpreter's standard library (draft)."""

from configs import text_small


def get_config():
  config = text_small.get_config()
  config.data.name = "stdlib"
  return config
