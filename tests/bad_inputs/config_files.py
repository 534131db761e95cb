"""Config files."""

from bad_inputs.cases import (
  COMPARE,
  DIGITS,
  EXPLAIN,
  HUGE,
  LONG,
  TRAIN,
  Bad,
  names,
)
from bad_inputs.files import bind, fifo, file, folder, link, some_text

# Every field with a value of another type, which only a config file can give.
OTHER_TYPES: dict[str, tuple[str, ...]] = {
  "data.name": ("None", "7", "['digits']"),
  "data.path": ("None", "7"),
  "data.length": ("'64'", "None", "64.5"),
  "data.columns": ("None", "True"),
  "data.fractions": ("None", "'0.9'", "(0.9, 0.05, '0.05')"),
  "data.rate": ("None", "'12 kHz'"),
  "model.num_layers": ("None", "'2'", "[2]"),
  "model.num_heads": ("None", "True"),
  "model.width": ("None", "16.5", "{}"),
  "model.half_size": ("None", "'no'", "2"),
  "model.dropout": ("None", "'0'", "(0.1,)"),
  "model.init": ("None", "0"),
  "model.token_std": ("None", "'0.1'"),
  "model.position_std": ("None", "[0.1]"),
  "model.dtype": ("None", "32"),
  "model.remat": ("None", "True"),
  "model.experts": ("None", "'8'", "True"),
  "model.experts_per_token": ("None", "2.0"),
  "model.experts_every": ("None", "(1,)"),
  "loss.load_balance": ("None", "'0.01'"),
  "loss.router_z": ("None", "True"),
  "loss.codebook": ("None", "True"),
  "loss.span": ("None", "True"),
  "attention.pattern": ("None", "7", "['dense']"),
  "attention.mode": ("None", "['heads']"),
  "attention.cycle": ("None", "0", "'01'"),
  "attention.stride": ("None", "8.5", "'8'"),
  "attention.window": ("None", "'8'"),
  "attention.width": ("None", "'2'"),
  "attention.num_summaries": ("None", "1.5"),
  "attention.backend": ("None", "1"),
  "attention.tile": ("None", "'16'"),
  "optimizer.name": ("None", "1"),
  "optimizer.learning_rate": ("None", "'1e-3'", "1j"),
  "optimizer.adam_learning_rate": ("None", "'1e-3'"),
  "optimizer.warmup_steps": ("None", "0.5"),
  "optimizer.beta1": ("None", "'0.9'"),
  "optimizer.beta2": ("None", "(0.9,)"),
  "optimizer.epsilon": ("None", "'1e-8'"),
  "optimizer.weight_decay": ("None", "'0'"),
  "optimizer.clip_norm": ("None", "'1'"),
  "optimizer.ema_decay": ("None", "'0.9'"),
  "train.seed": ("None", "'0'", "0.5"),
  "train.steps": ("None", "'many'", "1000.0"),
  "train.batch_size": ("None", "16.0", "True"),
  "train.accumulation": ("None", "'1'"),
  "train.log_every": ("None", "'1'"),
  "train.nonfinite": ("None", "False"),
  "train.max_skipped": ("None", "1.5"),
  "train.spike": ("None", "'1.5'"),
  "eval.every": ("None", "0.5"),
  "eval.batch_size": ("None", "'16'"),
  "eval.sequences": ("None", "'all'"),
  "checkpoint.every": ("None", "'1'"),
  "checkpoint.keep": ("None", "1.5"),
  "checkpoint.keep_best": ("None", "'1'"),
  "checkpoint.on_error": ("None", "0"),
  "mesh.data": ("None", "8.0"),
  "mesh.fsdp": ("None",),
  "mesh.sequence": ("None",),
  "mesh.tensor": ("None", "'2'"),
}

# A config file that starts with the digits' settings as a dictionary.
EDITED = """
from configs import digits
from ml_collections import ConfigDict
def get_config():
  settings = digits.get_config().to_dict()
  {}
  return ConfigDict(settings)
"""


def on_config(script: str, content: str | bytes | None, message: str) -> Bad:
  words = ("--config=config.py",)
  if script == TRAIN:
    words += ("--workdir=new",)
  if script == COMPARE:
    words += ("--workdir=new", "--vary=attention.pattern=dense,local")
  prepare = None if content is None else file("config.py", content)
  return Bad(script, words, message, prepare)


def other_types():
  for field, values in OTHER_TYPES.items():
    group, name = field.split(".")
    for value in values:
      edit = EDITED.format(f"settings[{group!r}][{name!r}] = {value}")
      yield on_config(TRAIN, edit, names(field, value))


# What a config file contains, and what the error says.
NO_CONFIG = "get_config|config is of type"
CONFIG_FILES: tuple[tuple[str | bytes | None, str], ...] = (
  (None, "config.py"),
  ("", "get_config"),
  ("get_config = None", "config"),
  ("get_config = 7", "config"),
  ("def get_config(:", "config.py|invalid syntax"),
  ("def get_config():\nreturn 1", "config.py|indented"),
  ("\0\1\2", "config.py|null byte"),
  (b"\xff\xfe\x00", "config.py|utf-8|null byte"),
  ("x = " + "(" * 300 + ")" * 300, "parenthes"),
  ("x = " + "-" * 100_000 + "1", "config"),
  ("x = " + HUGE, "config"),
  ("import no_such_module", "no_such_module"),
  ("from configs import no_such_preset", "no_such_preset"),
  ("raise ValueError('a\\nb')", "a b"),
  ("raise Exception", "Exception"),
  ("raise SystemExit(0)", "config"),
  ("import sys\nsys.exit('no GPU here')", "no GPU here"),
  ("class E(Exception):\n  def __str__(self): 1 / 0\nraise E", "config"),
  ("def get_config(): import sys; sys.exit(0)", "config"),
  ("def get_config(): raise GeneratorExit", "config"),
  ("def get_config(): raise MemoryError", "config|memory"),
  ("def get_config(): return get_config()", "recursion"),
  ("def get_config(): return [0] * 10**15", "MemoryError|memory"),
  ("def get_config(): return 1 / 0", "division by zero"),
  ("def get_config(): return {}['colour']", "colour"),
  ("def get_config(): return open('no such file')", "no such file"),
  ("def get_config(size): return size", "size"),
  ("def get_config(): pass", NO_CONFIG),
  ("def get_config(): return 7", NO_CONFIG),
  ("def get_config(): return 'digits'", NO_CONFIG),
  ("def get_config(): return []", NO_CONFIG),
  ("def get_config(): return {}", NO_CONFIG),
  ("def get_config(): yield 1", NO_CONFIG),
  ("def get_config(): return get_config", NO_CONFIG),
  (
    "import types\ndef get_config(): return types.SimpleNamespace(data=1)",
    NO_CONFIG,
  ),
  (
    "from ml_collections import ConfigDict\n"
    "def get_config(): return ConfigDict()",
    "lacks|no group",
  ),
  *(
    (EDITED.format(edit), message)
    for edit, message in (
      ("del settings['eval']", "'?eval'?"),
      ("del settings['train']['steps']", "train.steps"),
      ("del settings['attention']['tile']", "attention.tile"),
      ("del settings['optimizer']['beta1']", "optimizer.beta1"),
      ("del settings['checkpoint']['keep']", "checkpoint.keep"),
      ("del settings['data']['rate']", "data.rate"),
      ("settings['train']['step'] = 4", "train.step"),
      ("settings['attention']['heads'] = 4", "attention.heads"),
      ("settings['model']['depth'] = 4", "model.depth"),
      ("settings['data']['sise'] = 4", "data.sise"),
      ("settings['evaluation'] = {}", "evaluation"),
      ("settings['name'] = 'mine'", "name"),
      ("settings[''] = 1", "config|''"),
      ("settings['model'] = None", "model"),
      ("settings['model'] = 7", "model"),
      ("settings['model'] = {}", "model.num_layers"),
      ("settings['model'] = []", "model"),
      ("settings['train']['steps'] = {'a': 1}", "train.steps"),
      ("settings = {'model': settings}", "lacks|no group"),
      ("settings['train']['steps'] = lambda: 4", "train.steps"),
      ("settings['train']['steps'] = 10**5000", "train.steps"),
      ("settings['train']['seed'] = -10**5000", "train.seed"),
      ("settings['model']['width'] = 10**400", "model.width"),
      (
        "settings['data'] |= dict(name='bytes', path='a\\0b')",
        "data.path|null",
      ),
      ("settings['data']['name'] = 'x' * 10**5", "data.name"),
      ("settings['attention']['cycle'] = (0,) * 10**4 + (9,)", "cycle"),
      ("import os; os.chdir('/no/such')", "/no/such"),
    )
  ),
  (
    "from configs import digits\n"
    "from ml_collections import config_dict\n"
    "def get_config():\n"
    "  config = digits.get_config()\n"
    "  config.train.steps = config_dict.placeholder(int, required=True)\n"
    "  return config",
    "required",
  ),
  (
    "from configs import digits\n"
    "def get_config():\n"
    "  config = digits.get_config()\n"
    "  config.train.steps = 'many'\n"
    "  return config",
    "steps",
  ),
)


def config_files():
  for content, message in CONFIG_FILES:
    yield on_config(TRAIN, content, message)
  for script in EXPLAIN, COMPARE:
    for content, message in CONFIG_FILES[:40:4]:
      yield on_config(script, content, message)
    edit = EDITED.format("settings['optimizer']['beta1'] = 2.0")
    yield on_config(script, edit, r"optimizer\.beta1")
  for path, message, prepare in (
    ("", "--?config.*empty|config", None),
    (".", "folder", None),
    ("/dev/null", "/dev/null", None),
    ("/dev/zero", "/dev/zero", None),
    ("fifo", "fifo", fifo("fifo")),
    ("loop", "loop", link("loop", "loop")),
    ("dangling", "dangling", link("dangling", "nothing")),
    ("folder.py", "folder.py", folder("folder.py")),
    ("socket", "socket", bind("socket")),
    (f"{DIGITS}:8", "get_config|argument", None),
    (LONG, "long", None),
    ("text", "config|syntax", some_text),
    ("digits.pyc", "config|null|utf-8", file("digits.pyc", b"\xcb\r\r\n\0")),
  ):
    words = f"--config={path}", "--workdir=new"
    yield Bad(TRAIN, words, message, prepare)
