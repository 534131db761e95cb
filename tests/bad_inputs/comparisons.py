"""Settings that compare.py varies, and its folders."""

import re

from bad_inputs.cases import COMPARE, DIGITS, HUGE, Bad, compare
from bad_inputs.files import fifo, file, folder, several


def comparisons():
  for text, message in (
    ("", "vary"),
    ("=", "vary=="),
    ("pattern", "no field 'pattern'"),
    ("attention.pattern", "different values"),
    ("attention.pattern=", "different values"),
    ("attention.pattern=dense,,local", "different values"),
    ("attention.pattern=dense,dense", "different values"),
    ("attention.pattern=dense,dense ", "different values"),
    ("attention.pattern=dense,zigzag", "zigzag"),
    ("attention.pattern=Full(),dense", r"Full\(\)"),
    ("attention.patern=dense", "no field 'attention.patern'"),
    ("attention=dense", "no field 'attention'"),
    ("attention.=dense", "no field 'attention.'"),
    (".pattern=dense", "no field '.pattern'"),
    ("attention.pattern.x=dense", "no field 'attention.pattern.x'"),
    ("attention.cycle=(0,),(2,)", r"attention.cycle.*2"),
    ("attention.cycle=(0,", "attention.cycle"),
    ("attention.stride=8,65", "attention.stride=65"),
    ("train.seed=1,2", "train.seed"),
    ("train.steps=2,4", "train.steps"),
    ("train.batch_size=0,4", "train.batch_size=0"),
    ("train.batch_size=8,1000000000", "train.batch_size=1000000000"),
    ("train.accumulation=1,3", "accumulation=3"),
    ("checkpoint.keep=0,1", "checkpoint.keep=0"),
    ("checkpoint.on_error=stop,ignore", "checkpoint.on_error.*ignore"),
    ("model.width=16,wide", "model.width.*wide"),
    ("model.width=16,17", "model.width=17|num_heads"),
    ("model.width=16,10000000", "model.width=10000000"),
    ("model.width=16,1e1", "model.width.*(1e1|10)"),
    ("model.width=__import__('os')", "model.width"),
    (f"model.width=1,{HUGE}", "model.width"),
    ("model.width=" + "[" * 2000, "model.width"),
    ("model.half_size=True,maybe", "model.half_size.*maybe"),
    ("model.dropout=0.0,1.0", "model.dropout=1.0"),
    ("optimizer.learning_rate=0.001,-1.0", "optimizer.learning_rate=-1.0"),
    ("optimizer.learning_rate=0.001,nan", "optimizer.learning_rate"),
    ("optimizer.beta1=0.9,2.0", "optimizer.beta1=2.0"),
    ("optimizer.clip_norm=0.0,1.0", "optimizer.clip_norm=0.0"),
    ("eval.batch_size=0,8", "eval.batch_size=0"),
    ("data.name=digits,mnist", "mnist"),
    ("data.fractions=0.9,0.05,0.05", "data.fractions"),
  ):
    yield compare(f"--vary={text}", message=message)
  vary = "--vary=attention.pattern=dense,local"
  for text in (
    *(
      "",
      "500",
      "steps",
      "steps:",
      "steps:x",
      "hours:3",
      "steps:0",
      "steps:-1",
    ),
    *("steps:-1", "steps:nan", "steps:inf", "steps:0.5", "steps:2.5"),
    *(
      "steps:1e30",
      "seconds:0",
      "seconds:nan",
      "processor_seconds:0",
      "flops:-1",
      "flops:1e400",
    ),
    *("steps:1e400", "Steps:5", "steps=5", f"steps:{HUGE}", "steps:5:5"),
  ):
    shown = re.escape(f"--budget={text}") if 0 < len(text) < 99 else "--budget"
    yield compare(vary, f"--budget={text}", message=shown)
  for word, message in (
    ("--seeds=0", "seeds=0"),
    ("--seeds=-1", "seeds=-1"),
    ("--seeds=1.5", "seeds.*1.5"),
    ("--seeds=two", "seeds.*two"),
    ("--split=test", "split"),
    ("--workdir=", "--workdir"),
    ("--workdir=/proc/nowhere", "/proc/nowhere"),
    ("more", "unexpected argument 'more'"),
    ("--varry=x", "varry"),
  ):
    yield compare(vary, word, message=message)
  yield compare("--budget=steps:3", message="--vary is missing")
  yield compare("--vary=train.steps=2,4", "--budget=steps:3", message="steps")
  yield Bad(COMPARE, (f"--config={DIGITS}", vary), "--workdir is missing")
  yield Bad(COMPARE, (vary, "--workdir=new"), "--config is missing")
  yield compare(vary, message="new", prepare=file("new", "mine"))
  for content in "", "{", "[]", "7", "null", "{}", '{"seeds": 2}':
    prepare = file("new/comparison-of.json", content)
    message = "comparison-of.json|another comparison"
    yield compare(vary, message=message, prepare=prepare)
  path = "new/comparison-of.json"
  yield compare(vary, message="comparison-of.json", prepare=folder(path))
  prepare = several(folder("new"), fifo(path))
  yield compare(vary, message="comparison-of.json", prepare=prepare)
