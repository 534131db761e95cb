"""Flags of all commands."""

from bad_inputs.cases import (
  DIGITS,
  EVAL,
  EXPLAIN,
  FIGURES,
  HUGE,
  LONG,
  REPORT,
  SAMPLE,
  TRAIN,
  Bad,
  explain,
  on_run,
  train,
)
from bad_inputs.files import copy, file, several


def flags():
  config, new = f"--config={DIGITS}", "--workdir=new"
  for word, message in (
    ("more", "unexpected argument 'more'.*--name=value"),
    ("--wrokdir=there", "wrokdir"),
    ("-w", "'w'"),
    ("--config.attention.patern=fixed", "patern"),
    ("--config.atention.pattern=fixed", "atention"),
    ("--config.train.steps.more=4", "steps"),
    ("--config.train=3", "train"),
    ("--config.train.=3", "train"),
    ("--config.train.batch-size=8", "batch-size"),
    ("--config.train,steps=8", "train,steps"),
    ("--config.train.steps[0]=8", "steps"),
    ("--config.=3", r"--config\."),
    ("--config.data.__class__=3", "__class__"),
    ("--config.train.steps", "train.steps"),
    ("--noconfig", "noconfig"),
    ("--workdir", "workdir"),
    ("--replay", "replay"),
    ("--replay=0", "replay=0"),
    ("--replay=-1", "replay=-1"),
    ("--replay=last", "replay.*last"),
    ("--replay=1.5", "replay.*1.5"),
    ("--replay=3", "new is not a run"),
    ("--coordinator=host:1", "--num_processes and --process_id must be given"),
    ("--coordinator=", "--coordinator is empty"),
    ("--num_processes=2", "--coordinator and --process_id must be given"),
    ("--num_processes=0", "num_processes=0"),
    ("--process_id=-1", "process_id=-1"),
    ("--process_id=first", "process_id.*first"),
    ("--distributed=yes", "distributed.*yes"),
    ("--connect_seconds=0", "connect_seconds=0"),
    ("--heartbeat_seconds=x", "heartbeat_seconds.*x"),
    ("--verbosity=loud", "verbosity.*loud"),
    ("--flagfile=nowhere", "nowhere"),
    ("--config.train.steps=\u0664\u0664.5", "train.steps"),
    (f"--config.train.steps={HUGE}", "train.steps"),
    (f"--{LONG}", "too long|xxx"),
  ):
    yield train(word, message=message)
  yield Bad(TRAIN, (new,), "--config is missing")
  yield Bad(TRAIN, (config,), "--workdir is missing")
  same = (
    "from sparse_transformer import config\n"
    "def get_config(): return config.read_config('run')"
  )
  for step in "3", str(2**70):
    words = "--config=same.py", "--workdir=run", f"--replay={step}"
    prepare = several(copy, file("same.py", same))
    yield Bad(TRAIN, words, f"{step}.*replayed.*steps 1 to 2", prepare)
  yield Bad(TRAIN, (config, "--workdir="), "--workdir.*empty|--workdir=''")
  yield Bad(TRAIN, (), "--config is missing")
  yield Bad(EXPLAIN, (), "--config is missing")
  for script in EVAL, SAMPLE, REPORT:
    yield Bad(script, (), "--workdir is missing")
  for script in EVAL, SAMPLE, REPORT, EXPLAIN:
    yield Bad(script, ("--workdir=",), "--workdir|run")
    yield Bad(script, ("--workdir=nowhere",), "nowhere is not a run.*train.py")
    yield Bad(script, (f"--workdir={LONG}",), "long|not a run")
    yield Bad(script, ("--workdir=~nobody/run",), "~nobody/run")
    yield on_run(script, "more", message="unexpected argument 'more'")
    yield on_run(script, "--wrokdir=there", message="wrokdir")
    yield on_run(script, "--config.train.stepz=3", message="stepz")
    yield on_run(script, "--config=x", message="--config")
  for word, message in (
    ("--split=tests", "tests.*train.*validation.*test"),
    ("--split=", "split"),
    ("--weights=best", "best.*ema"),
    ("--min_context=-1", "min_context=-1"),
    ("--min_context=3", "min_context=3 must be 0 for images"),
    ("--min_context=", "min_context"),
    ("--min_context=x", "min_context=x"),
    ("--min_context=0,", "min_context=0,"),
    ("--min_context=0.5", "min_context=0.5"),
    (f"--min_context={10**30}", "min_context"),
    (f"--min_context={HUGE}", "min_context"),
    ("--step=last", "step=last"),
    ("--step=best,2", "step=best,2"),
    ("--step=99", "no checkpoint of step 99.* 2$"),
    ("--step=-1", "no checkpoint of step -1|step=-1"),
    ("--step=2,99", "no checkpoint of step 99"),
    ("--step=all,2", "step=all,2"),
    ("--step=2,,2", "step=2,,2"),
    (f"--step={10**30}", "no checkpoint of step 1000|step=1000"),
    (f"--step={HUGE}", "step"),
    ("--config.eval.batch_size=0", "eval.batch_size=0"),
    ("--config.eval.batch_size=-1", "eval.batch_size=-1"),
    ("--config.eval.batch_size=1000000000000", "eval.batch_size=1000000000000"),
    ("--config.model.width=32", "another network.*overrides"),
    ("--config.model.width=10000000", "model.width=10000000|another network"),
    ("--config.model.num_heads=3", "num_heads=3"),
    ("--config.attention.stride=x", "attention.stride.*x"),
    ("--config.attention.stride=0", "attention.stride=0"),
    ("--config.attention.backend=fast", "fast"),
    ("--config.attention.backend=triton", "needs an NVIDIA GPU"),
    ("--config.attention.backend=mosaic", "needs a TPU"),
    ("--config.attention.tile=-1", "tile=-1"),
    ("--config.data.name=mnist", "mnist"),
  ):
    yield on_run(EVAL, word, message=message)
  for word, message in (
    ("--num=0", "num=0"),
    ("--num=-1", "num=-1"),
    ("--num=1.5", "num.*1.5"),
    ("--num=", "num"),
    ("--num=1000000000", "num=1000000000"),
    (f"--num={2**70}", f"num={2**70}"),
    ("--temperature=-1", "temperature=-1"),
    ("--temperature=nan", "temperature=nan"),
    ("--temperature=inf", "temperature=inf"),
    ("--temperature=warm", "temperature.*warm"),
    ("--top_k=-1", "top_k=-1"),
    ("--top_k=1.5", "top_k.*1.5"),
    ("--top_p=0", "top_p=0"),
    ("--top_p=1.5", "top_p=1.5"),
    ("--top_p=-1", "top_p=-1"),
    ("--top_p=nan", "top_p=nan"),
    (f"--seed={2**70}", f"seed={2**70}"),
    (f"--seed={-(2**70)}", f"seed={-(2**70)}"),
    ("--seed=x", "seed.*x"),
    ("--step=99", "no checkpoint of step 99"),
    ("--step=-1", "no checkpoint of step -1|step=-1"),
    ("--step=all", "step.*all"),
    ("--step=best,2", "step=best,2"),
    ("--given=-1", "given=-1"),
    ("--given=65", "given=65 .*64"),
    ("--given=1000000000000", "given=1000000000000"),
    ("--given=half", "given.*half"),
    ("--prompt=text", "--prompt is for text"),
    ("--cache=maybe", "cache.*maybe"),
    ("--config.model.num_layers=0", "num_layers"),
    ("--config.optimizer.beta1=2.0", "beta1"),
  ):
    yield on_run(SAMPLE, word, message=message)
  for word, message in (
    ("more", "unexpected argument 'more'"),
    ("--jsn", "jsn"),
    ("--json=maybe", "json.*maybe"),
    ("--out", "out"),
    ("--config.train.batch_size=0", "batch_size=0"),
    ("--config.train.accumulation=3", "accumulation=3"),
    ("--config.attention.stride=x", "stride.*x"),
    ("--config.model.num_heads=3", "num_heads=3"),
    ("--config.optimizer.beta2=-1.0", "optimizer.beta2=-1.0"),
    ("--config.data.name=mnist", "mnist"),
    ("--target", "target"),
    ("--target=", "--target is empty"),
    ("--target=h1000", "unknown target 'h1000'; known: .*h100"),
    ("--target=h100:8", "slices x hosts x GPUs, such as h100:1x1x8"),
    ("--target=v5e:0x1", "topology of v5e is X x Y"),
    ("--target=v5e:8x8", "batch_size=16.*multiple of mesh.data=64"),
    ("--part=attention", "--part.*--target"),
    ("--part=layer", "part.*layer"),
  ):
    yield explain(word, message=message)
  for words, message in (
    ((), "one argument"),
    (("a.png", "b.png"), "one argument"),
    (("nowhere/a.png",), "nowhere"),
    (("a.xyz",), "xyz"),
    (("--out=a.png",), "out"),
    (("",), "argument|file"),
  ):
    yield Bad(FIGURES, words, message)
