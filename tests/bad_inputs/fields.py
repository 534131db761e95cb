"""Fields of a config, on the command line."""

import re

from bad_inputs.cases import names, train
from bad_inputs.files import file, some_text
from bad_inputs.sources import wav

# The fields of a config, on the command line. A value has the type of its
# field and is echoed in the error, or is given with what the error says.

OVERRIDES: dict[str, tuple] = {
  "data.name": (
    ("mnist", "'mnist'.*digits"),
    ("", "data.name"),
    "Digits",
    "../digits",
    "sparse_transformer.data",
  ),
  "model.num_layers": ("0", "-1", "1.5", "1000000000", "many", ""),
  "model.num_heads": (
    ("3", "num_heads=3 must divide model.width=128"),
    *("0", "-2", "1000000000"),
  ),
  "model.width": ("0", "-16", "10000000", str(2**70), "wide"),
  "model.half_size": ("maybe", "2"),
  "model.dropout": ("-0.1", "1.0", "1.5", "nan", "inf", "high"),
  "model.init": ("xavier", ("", "model.init")),
  "model.token_std": ("-1.0", "nan", "inf"),
  "model.position_std": ("-1.0", "nan", "inf"),
  "model.dtype": (
    ("float8", "float8.*float32, bfloat16"),
    *("float64", "int8", "Float32"),
  ),
  "model.remat": (("all", "all.*none, attention"), "True"),
  "model.experts": (
    ("1", "experts_per_token=2 must be at most model.experts=1"),
    *("-1", "1.5", "1000000000", "many"),
  ),
  "model.experts_per_token": ("0", "-1", "1.5"),
  "model.experts_every": ("0", "-1", "1.5"),
  "loss.load_balance": ("-1.0", "nan", "inf", "much"),
  "loss.router_z": ("-1.0", "nan", "inf"),
  "loss.codebook": ("-1.0", "nan", "inf"),
  "loss.span": ("-1.0", "nan", "inf"),
  "attention.mode": (
    ("mixed", "'mixed'.*interleaved, merged, heads"),
    ("", "attention.mode"),
    "heads,merged",
  ),
  "attention.cycle": (
    ("(0,2)", r"\(0, 2\).*0 to 1"),
    ("(-1,)", r"\(-1,\)"),
    ("('a',)", "'a'"),
    ("(0.5,)", "0.5"),
    ("((0,),)", r"\(0,\)"),
    ("(0", r"\(0"),
    ("zero", "zero"),
    ("(0, 1 - 1)", "1 ?- ?1|0"),
    ("x.y", "x.y"),
  ),
  "attention.stride": (
    ("65", "stride=65 .*between 1 and the 64"),
    *("0", "-1", str(2**31), "1" * 30),
  ),
  "attention.window": (
    ("65", "window=65 .*between 1 and the 64"),
    *("0", "-1", str(2**31)),
  ),
  "attention.backend": (
    ("fast", "'fast'.*auto.*dense"),
    ("", "backend"),
    "Dense",
  ),
  "attention.tile": ("-1", "1.5", "many"),
  "optimizer.name": ("sgd", "Muon", "None"),
  "optimizer.learning_rate": ("-1.0", "nan", "inf", ("1e400", "inf"), "fast"),
  "optimizer.adam_learning_rate": (
    ("0.01", "is for optimizer.name=muon"),
    *("-1.0", "nan", "inf"),
  ),
  "optimizer.warmup_steps": (
    ("700", "warmup_steps=700 .*train.steps=700"),
    *("-1", "701", "1.5"),
  ),
  "optimizer.beta1": ("2.0", "1.0", "-0.1", "nan"),
  "optimizer.beta2": ("2.0", "1.0", "-1.0", "nan"),
  "optimizer.epsilon": ("-1.0", "nan", "inf"),
  "optimizer.weight_decay": ("-1.0", "nan", "inf"),
  "optimizer.clip_norm": ("0.0", "-1.0", "nan"),
  "optimizer.ema_decay": ("-0.1", "1.5", "nan"),
  "train.seed": ("-1", str(2**70), "1.5", "random"),
  "train.steps": ("-1", "2.5", "many", "1" * 30, ("", "train.steps")),
  "train.batch_size": ("0", "-16", "1000000000", str(2**70), "two"),
  "train.accumulation": (
    ("3", "train.batch_size=16 .*multiple.*accumulation=3"),
    *("0", "-1", "17"),
  ),
  "train.log_every": ("-1", "often"),
  "train.nonfinite": (("ignore", "stop, skip"), ("", "train.nonfinite")),
  "train.max_skipped": ("-1", "all"),
  "train.spike": ("-1.0", "nan"),
  "eval.every": ("-1", "never"),
  "eval.batch_size": ("0", "-1", "1.5"),
  "eval.sequences": ("-1", "all"),
  "checkpoint.every": ("-1", "1e3"),
  "checkpoint.keep": ("0", "-1", "all"),
  "checkpoint.keep_best": ("-1", "1.5"),
  "checkpoint.on_error": ("ignore", ("", "checkpoint.on_error")),
  "mesh.data": ("0", "1.5"),
  "mesh.fsdp": ("-2", "7"),
  "mesh.sequence": ("0", "7"),
  "mesh.tensor": ("all", "7"),
}


def overrides():
  for field, values in OVERRIDES.items():
    for value in values:
      text, shown = (value, re.escape(value)) if value == str(value) else value
      message = names(field, rule=shown)
      yield train(f"--config.{field}={text}", message=message)


# Fields that only some networks or sources have.
TEXT = "--config.data.name=bytes", "--config.data.path=text"


def of_some():
  fixed = "--config.attention.pattern=fixed"
  for field, value, rule in (
    ("width", 9, r"width=9|Summary\(8, 9\)"),
    ("width", 0, "width"),
    ("width", -1, "width"),
    ("num_summaries", 0, "num_summaries=0"),
    ("num_summaries", -1, "num_summaries=-1"),
    ("num_summaries", "3 --config.attention.width=4", "shift"),
  ):
    more = f"--config.attention.{field}={value}".split()
    yield train(fixed, *more, message=rule)
  for field, value in (
    ("length", "0"),
    ("length", "-1"),
    ("length", "1001"),
    ("length", str(2**40)),
    ("length", str(2**70)),
    ("length", "1e3"),
    ("columns", "0"),
    ("columns", "-1"),
    ("columns", str(2**40)),
    ("columns", str(2**70)),
  ):
    more = "--config.data.length=32", f"--config.data.{field}={value}"
    message = names(f"data.{field}", value)
    yield train(*TEXT, *more, message=message, prepare=some_text)
  for value in (
    "(0.5, 0.5)",
    "(1.0, 0.0, 0.0)",
    "(0.5, 0.25, 0.5)",
    "(-0.5, 1.0, 0.5)",
    "(nan, 0.5, 0.5)",
    "()",
    "0.9",
    "('0.9', '0.05', '0.05')",
    "('a', 'b', 'c')",
    "(inf, 0.1, 0.1)",
    "(0.9, 0.05, 0.05, 0.0)",
  ):
    more = "--config.data.length=32", f"--config.data.fractions={value}"
    yield train(*TEXT, *more, message="data.fractions", prepare=some_text)
  for value in "0", "-5", str(2**40), "44.1kHz":
    yield train(
      "--config.data.name=audio",
      "--config.data.path=wave.wav",
      f"--config.data.rate={value}",
      message=names("data.rate", value),
      prepare=file("wave.wav", wav()),
    )
  for value in (
    "--config.attention.cycle=(2,)",
    "--config.attention.cycle=(0,1,2)",
  ):
    pattern = "--config.attention.pattern=Local(4), Strided(4)"
    yield train(pattern, value, message="attention.cycle.*2.*0 to 1")
