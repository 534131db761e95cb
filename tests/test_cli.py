"""Mistakes on the command line are reported in one line, with status 1."""

import asyncio
import bz2
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import runs
from absl import flags

from sparse_transformer import cli, config as config_lib, sample
from sparse_transformer.model import kv_cache, sampling
from sparse_transformer.training import checkpoint, scoring, signals
from sparse_transformer.training.experiment import Experiment
from sparse_transformer.training.loop import train

# Raised by ml_collections when it loads a config file.
pytestmark = pytest.mark.filterwarnings(
  "ignore:the load_module:DeprecationWarning"
)
DIGITS = f"--config={runs.REPO / 'configs' / 'digits.py'}"
TRAIN, EVAL, SAMPLE = "train.py", "eval.py", "sparse_transformer/sample.py"
EXPLAIN = "sparse_transformer/explain.py"
COMPARE = "sparse_transformer/compare.py"
REPORT = "sparse_transformer/report.py"
# The flags of each command. A stored config is that of --workdir.
FLAGS = {
  "train.py": "config replay workdir",
  "eval.py": "min_context split step weights workdir",
  "-m sparse_transformer.sample": (
    "[no]cache given num prompt seed step temperature top_k top_p workdir"
  ),
  "-m sparse_transformer.explain": "config [no]json out",
  "-m sparse_transformer.compare": "budget config seeds split vary workdir",
  "-m sparse_transformer.report": "workdir",
  "-m sparse_transformer.data": "data_dir",
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """The workdir of a run of 2 steps, which tests must not change."""
  workdir = tmp_path_factory.mktemp("trained")
  train(runs.tiny(**{"train.steps": 2, "model.num_layers": 1}), workdir)
  return workdir


@pytest.fixture
def workdir(trained, tmp_path):
  """A copy of that run."""
  return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def fails(capfd, tmp_path):
  """fails(script, words, message): one line, status 1, nothing written."""

  def check(script, words, message):
    before = runs.files(tmp_path)
    capfd.readouterr()
    status = runs.command(script, *words)
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and err.endswith("\n"), err
    assert "Traceback" not in err and len(err) < 2000
    assert re.search(message, err), err
    assert err.split(": ")[0] == pathlib.Path(script).name
    assert status == 1
    assert "Traceback" not in out
    assert runs.files(tmp_path) == before

  return check


# Words on the command line of train.py, and what the error says.
MISTAKES = {
  "unknown pattern": (
    "--config.attention.pattern=zigzag",
    "attention.pattern 'zigzag'.*dense, local, strided, fixed",
  ),
  "unknown mode": (
    "--config.attention.mode=mixed",
    "attention.mode 'mixed'.*interleaved, merged, heads",
  ),
  "unknown factor": (
    "--config.attention.cycle=(0,2)",
    r"attention.cycle.*\(0, 2\).*0 to 1",
  ),
  "stride beyond the sequence": (
    "--config.attention.stride=65",
    "attention.stride=65 .*between 1 and the 64",
  ),
  "no stride": ("--config.attention.stride=0", "attention.stride=0 .*1"),
  "window beyond the sequence": (
    "--config.attention.window=65",
    "attention.window=65 .*64",
  ),
  "width beyond the stride": (
    "--config.attention.pattern=fixed --config.attention.width=9",
    r"Summary\(8, 9\)|width=9",
  ),
  "summaries beyond the stride": (
    "--config.attention.pattern=fixed --config.attention.width=4"
    " --config.attention.num_summaries=3",
    r"Summary\(8, 4, shift=2\)|shift=2",
  ),
  "unknown backend": (
    "--config.attention.backend=fast",
    "backend.*'fast'.*auto.*dense",
  ),
  "misspelt override": ("--config.attention.patern=fixed", "patern"),
  "misspelt group": ("--config.atention.pattern=fixed", "atention"),
  "override of another type": ("--config.train.steps=many", "steps.*many"),
  "fraction for a count": ("--config.train.steps=2.5", "steps.*2.5"),
  "number for a group": ("--config.train=3", "train"),
  "misspelt flag": ("--wrokdir=there", "wrokdir"),
  "stray argument": ("more", "unexpected argument 'more'.*--name=value"),
  "unknown data": ("--config.data.name=mnist", "'mnist'.*digits"),
  "text without a path": ("--config.data.name=bytes", "data.path"),
  "missing text": (
    "--config.data.name=bytes --config.data.path=/no/such",
    "/no/such.*data.path",
  ),
  "heads that do not divide the width": (
    "--config.model.num_heads=3",
    "num_heads=3 must divide model.width=128",
  ),
  "no layers": ("--config.model.num_layers=0", "num_layers.* at least 1"),
  "unknown type": ("--config.model.dtype=float8", "'float8'.*float32"),
  "dropout of everything": ("--config.model.dropout=1.0", "dropout=1.0"),
  "negative steps": ("--config.train.steps=-1", "train.steps=-1"),
  "warm-up as long as the run": (
    "--config.optimizer.warmup_steps=700",
    "optimizer.warmup_steps=700 .*train.steps=700",
  ),
  "batch that micro-batches do not divide": (
    "--config.train.accumulation=3",
    "train.batch_size=16 must be a multiple of.*accumulation=3",
  ),
  "no micro-batches": ("--config.train.accumulation=0", "accumulation=0"),
  "empty batch": ("--config.train.batch_size=0", "batch_size=0"),
  "negative batch": ("--config.train.batch_size=-16", "batch_size=-16"),
  "empty batch of evaluation": (
    "--config.eval.batch_size=0",
    "eval.batch_size=0",
  ),
  "no checkpoints kept": ("--config.checkpoint.keep=0", "checkpoint.keep=0"),
  "number of 5,000 digits": (
    f"--config.train.seed={5000 * '1'}",
    r"train.seed=1{100,300} \.\.\. 1{50,300}: .*5000 digits$",
  ),
  "number of 5,000 hexadecimal digits": (
    f"--config.train.seed=0x{5000 * '1'}",
    "train.seed=",
  ),
  "pattern of 5,000 digits": (
    f"--config.attention.pattern={5000 * '1'}",
    "attention.pattern '1.*1' has 5000 characters",
  ),
  "field of 5,000 letters": (f"--config.{5000 * 'a'}=1", r"a{100} \.\.\. a"),
  "missing file of flags": ("--flagfile=/no/such", "/no/such"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_training_reports_mistakes_before_it_writes(mistake, fails, tmp_path):
  words, message = MISTAKES[mistake]
  fails(
    TRAIN, [DIGITS, f"--workdir={tmp_path / 'run'}", *words.split()], message
  )


@pytest.mark.parametrize("command", FLAGS)
def test_help_lists_all_flags_without_loading_jax(command):
  done = subprocess.run(
    [sys.executable, "-X", "importtime", *command.split(), "--help"],
    cwd=runs.REPO,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0
  path = command.removeprefix("-m ").removesuffix(".py").replace(".", "/")
  path = path.replace("data", "data/__main__")
  source = (runs.REPO / f"{path}.py").read_text()
  assert done.stdout.lstrip().startswith(source[3:].split("\n")[0])
  listed = re.findall(r"^  --([^\s=:]+):", done.stdout, re.MULTILINE)
  assert listed == FLAGS[command].split()
  loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines()}
  assert "absl" in loaded and not loaded & {"jax", "matplotlib", "scipy"}


def test_help_is_shown_whatever_else_is_on_the_command_line(tmp_path, capfd):
  (tmp_path / "config.py").write_text("1 / 0")
  words = [f"--config={tmp_path / 'config.py'}", "--helpshort", "--wrokdir=x"]
  assert runs.command(TRAIN, *words) == 0
  out, err = capfd.readouterr()
  assert "Trains a model" in out and not err


@pytest.mark.parametrize(
  "script, flag",
  [
    (TRAIN, "workdir"),
    (EVAL, "workdir"),
    (EVAL, "min_context"),
    (EVAL, "step"),
    (SAMPLE, "workdir"),
    (SAMPLE, "prompt"),
    (REPORT, "workdir"),
    (EXPLAIN, "out"),
    (COMPARE, "workdir"),
    (COMPARE, "vary"),
  ],
)
def test_empty_flag_is_rejected(script, flag, fails, trained, monkeypatch):
  monkeypatch.chdir(trained)  # where the empty path leads
  words = {
    "config": DIGITS,
    "workdir": f"--workdir={trained}",
    "vary": "--vary=train.batch_size=8",
    flag: f"--{flag}=",
  }
  unused = {
    "config": script in (EVAL, SAMPLE, REPORT),
    "workdir": script == EXPLAIN,
    "vary": script != COMPARE,
  }
  before = runs.files(trained)
  words = [word for name, word in words.items() if not unused.get(name)]
  fails(script, words, f"--{flag} is empty; see --help")
  assert runs.files(trained) == before


def test_empty_config_is_rejected(fails, tmp_path):
  words = ["--config=", f"--workdir={tmp_path / 'run'}"]
  fails(TRAIN, words, "config file is an empty string")


def test_missing_flag_is_reported(fails, tmp_path):
  fails(TRAIN, [f"--workdir={tmp_path / 'run'}"], "--config is missing")
  fails(TRAIN, [DIGITS], "--workdir is missing")
  fails(EVAL, [], "--workdir is missing")
  fails(SAMPLE, [], "--workdir is missing")


@pytest.mark.parametrize(
  "content, message",
  [
    (None, "config.py"),
    ("", "get_config"),
    ("def get_config(:", "config.py|invalid syntax"),
    ("\0\1\2", "config.py|null byte"),
    ("import no_such_module", "no_such_module"),
    ("def get_config():\n  return 1 / 0", "division by zero"),
    ("def get_config():\n  return {}['colour']", "colour"),
    ("def get_config():\n  return 7", "default.py"),
    ("def get_config():\n  return {}", "default.py"),
    ("import sys\nsys.exit(0)", r"config cannot be used: it calls sys.exit\(0"),
    ("def get_config():\n  exit('done')", r"it calls sys.exit\('done'"),
    ("def get_config():\n  return get_config()", "too deep.*recursion"),
    ("def get_config():\n  return bytes(10**15)", "out of memory"),
    ("def get_config():\n  raise TypeError('a\\n b')", "config.py: .*: a$"),
    ("def get_config():\n  raise KeyError('a' * 9999)", r"field a+ \.\.\. a+$"),
  ],
  ids=range(15),
)
def test_broken_config_file_is_reported(
  content, message, fails, tmp_path, monkeypatch
):
  monkeypatch.setattr(sys, "path", [*sys.path])
  path = tmp_path / "config.py"
  if content is not None:
    path.write_text(content)
  words = [f"--config={path}", f"--workdir={tmp_path / 'run'}"]
  fails(TRAIN, words, message)


BZIP2 = bz2.compress(np.random.RandomState(0).bytes(10_000))


@pytest.mark.parametrize(
  "name, content, message",
  [
    ("text.bz2", BZIP2[:5000], "text.bz2 is damaged or truncated"),
    ("text", b"short " * 10, "data.length=64"),
  ],
)
def test_unusable_text_is_reported(name, content, message, fails, tmp_path):
  path = tmp_path / name
  path.write_bytes(content)
  words = [
    DIGITS,
    f"--workdir={tmp_path / 'run'}",
    "--config.data.name=bytes",
    f"--config.data.path={path}",
    "--config.data.length=64",
    "--config.data.columns=8",
  ]
  fails(TRAIN, words, message)


def test_missing_data_set_is_reported_with_the_command_that_prepares_it(
  fails, tmp_path
):
  (tmp_path / "empty").mkdir()
  words = [
    DIGITS,
    f"--workdir={tmp_path / 'run'}",
    "--config.data.name=cifar10",
    f"--config.data.path={tmp_path / 'empty'}",
  ]
  fails(TRAIN, words, "cifar10.*prepare cifar10")


def test_workdir_with_another_config_is_reported(fails, workdir):
  fails(
    TRAIN,
    [DIGITS, f"--workdir={workdir}"],
    r"another config: .*model.width \(16 there, 128 now\).*--workdir",
  )


def test_workdir_that_is_a_file_is_reported(fails, tmp_path):
  path = tmp_path / "file"
  path.write_text("mine")
  fails(TRAIN, [DIGITS, f"--workdir={path}"], re.escape(str(path)))
  fails(TRAIN, [DIGITS, f"--workdir={path / 'run'}"], re.escape(str(path)))


def test_workdir_that_cannot_be_written_is_reported(fails):
  fails(TRAIN, [DIGITS, "--workdir=/proc/run"], "/proc/run")


def test_workdir_that_is_a_link_to_nothing_is_reported(fails, tmp_path_factory):
  link = tmp_path_factory.mktemp("folder") / "link"
  link.symlink_to(link.parent / "nowhere")
  fails(TRAIN, [DIGITS, f"--workdir={link}"], "link")
  assert list(link.parent.iterdir()) == [link]


@pytest.mark.parametrize("name", ["empty", "missing"])
def test_replay_of_no_run_is_rejected(name, fails, tmp_path):
  (tmp_path / "empty").mkdir()
  words = [DIGITS, f"--workdir={tmp_path / name}", "--replay=1000000"]
  fails(TRAIN, words, f"{name} is not a run")


@pytest.mark.parametrize("script", [EVAL, SAMPLE])
def test_folder_that_is_not_a_run_is_reported(script, fails, tmp_path):
  (tmp_path / "empty").mkdir()
  for name in ("empty", "missing"):
    words = [f"--workdir={tmp_path / name}"]
    fails(script, words, f"{name} is not a run.*train.py")


def test_run_without_checkpoint_is_reported(fails, workdir):
  shutil.rmtree(workdir / "checkpoints" / "2")
  for script in (EVAL, SAMPLE):
    fails(script, [f"--workdir={workdir}"], "no checkpoint")
  shutil.rmtree(workdir / "checkpoints")
  fails(EVAL, [f"--workdir={workdir}"], "no checkpoint")


def test_unreadable_checkpoint_is_reported(fails, workdir):
  files = [f for f in (workdir / "checkpoints").rglob("*") if f.is_file()]
  path = max(files, key=lambda file: file.stat().st_size)
  path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  fails(EVAL, [f"--workdir={workdir}"], "checkpoints/2 is damaged: ")


@pytest.mark.parametrize("script", [EVAL, SAMPLE])
@pytest.mark.parametrize(
  "content", ["", "{", "[]", "7", '"x"', '{"data": {}}', '{"data": 7}', "\xff"]
)
def test_broken_config_of_a_run_is_reported(script, content, fails, workdir):
  path = workdir / "config.json"
  path.write_text(content, encoding="latin-1")
  fails(script, [f"--workdir={workdir}"], "config.json cannot be read")


@pytest.mark.parametrize(
  "script, word, message",
  [
    (EVAL, "--split=tests", "train.*validation.*test"),
    (EVAL, "--min_context=-1", "min_context=-1"),
    (EVAL, "--min_context=3", "min_context=3 must be 0 for images"),
    (EVAL, "--config.attention.patern=fixed", "patern"),
    (EVAL, "--config.attention.stride=x", "stride"),
    (EVAL, "--config.model.width=32", "another network.*overrides"),
    (EVAL, "--step=last", "step.*last"),
    (EVAL, "--step=99", "no checkpoint of step 99.* 2$"),
    (EVAL, "more", "unexpected argument 'more'"),
    (EVAL, "--spilt=test", "spilt"),
    (SAMPLE, "--num=0", "num=0"),
    (SAMPLE, "--temperature=-1", "temperature=-1"),
    (SAMPLE, "--temperature=warm", "temperature.*warm"),
    (SAMPLE, "--step=99", "no checkpoint of step 99"),
    (SAMPLE, "more", "unexpected argument 'more'"),
  ],
)
def test_mistake_with_a_run_is_reported(script, word, message, fails, workdir):
  fails(script, [f"--workdir={workdir}", word], message)


@pytest.mark.parametrize("error", [*cli.USER_ERRORS, FileNotFoundError])
def test_any_user_error_becomes_one_line(error, capfd, monkeypatch):
  def main(argv):
    raise error("first line\n  second line")

  monkeypatch.setattr(sys, "argv", ["tool"])
  with pytest.raises(SystemExit) as exit:
    cli.run(main)
  flags.FLAGS.unparse_flags()
  assert exit.value.code == 1
  assert capfd.readouterr().err == "tool: first line second line\n"


@pytest.mark.parametrize(
  "error, message",
  [
    (MemoryError(), "out of memory; .*MemoryError"),
    (RecursionError("too deep"), r"too deep \(too deep\)"),
    (OverflowError("of an int"), r"too large \(of an int\)"),
    (
      RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating\n7 bytes"),
      r"smaller batches.*explain .*\(RESOURCE_EXHAUSTED: [^7]*\)$",
    ),
    (ValueError(f"{9999 * 'a'} is {9999 * 'b '}"), r"a{9} \.\.\. .*b b$"),
  ],
)
def test_error_of_a_limit_becomes_one_line(error, message, capfd, monkeypatch):
  def main(argv):
    raise error

  monkeypatch.setattr(sys, "argv", ["tool"])
  with pytest.raises(SystemExit) as exit:
    cli.run(main)
  flags.FLAGS.unparse_flags()
  err = capfd.readouterr().err
  assert exit.value.code == 1 and err.count("\n") == 1 and len(err) < 2000
  assert re.search(message, err)


def test_closed_pipe_is_reported_in_one_line(capfd, monkeypatch):
  reader, writer = os.pipe()
  os.close(reader)
  monkeypatch.setattr(sys, "argv", ["tool"])
  with open(writer, "w") as out:
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit) as exit:
      cli.run(lambda argv: print("result"))
    flags.FLAGS.unparse_flags()
    print("and nothing when the process ends", flush=True)
  assert exit.value.code == 1
  assert capfd.readouterr().err == "tool: [Errno 32] Broken pipe\n"


@pytest.mark.parametrize(
  "words, error",
  [
    ([], RuntimeError),
    ([], NotImplementedError),
    (["--verbosity=1"], ValueError),
  ],
)
def test_bug_or_verbosity_keeps_the_traceback(words, error, monkeypatch):
  def main(argv):
    raise error("where")

  monkeypatch.setattr(sys, "argv", ["tool", *words])
  with pytest.raises(error, match="where"):
    cli.run(main)
  flags.FLAGS.unparse_flags()


def test_evaluation_prints_json_last_and_no_errors(trained):
  done = subprocess.run(
    [sys.executable, EVAL, f"--workdir={trained}", "--split=validation"],
    cwd=runs.REPO,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  result = json.loads(done.stdout.strip().split("\n")[-1])
  assert result["split"] == "validation"
  assert result["step"] == 2
  assert result["unit"] == "bits/dim"
  assert result["examples"] == 200
  assert result["tokens"] == 200 * 64
  assert 0 < result["bits_per_dim"] < np.log2(17) + 0.1
  assert 0 < result["standard_error"] < 0.1


def test_library_works_in_a_notebook(workdir, monkeypatch, capsys):
  """There, no flags are parsed, and the command line is the kernel's."""
  monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "x.json"])
  handlers = [signal.getsignal(number) for number in signals.STOPPING]

  async def cell():  # runs within the kernel's event loop
    config = config_lib.read_config(workdir)
    train(config, workdir)  # resumes
    kinds = dict(split="test", steps=[None], contexts=[0], weights="ema")
    (result,) = scoring.score_run(config, workdir, **kinds)
    experiment = Experiment(config)
    with checkpoint.Checkpoints(workdir) as checkpoints:
      params = experiment.restore(checkpoints).ema
    decoder = kv_cache.Decoder(experiment.model)
    sampler = sampling.Sampler()
    tokens, _ = sampling.sample(decoder, params, sampler, num=2, length=64)
    return result, sample.save(workdir, experiment.source, tokens)

  result, (path,) = asyncio.run(cell())
  assert result["step"] == 2 and path.exists()
  assert capsys.readouterr().err == ""
  assert not flags.FLAGS.is_parsed()
  assert handlers == [signal.getsignal(number) for number in signals.STOPPING]
