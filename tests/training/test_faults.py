"""Faults: signals, damage, full disks, bad numbers, bad inputs.

Real processes, signals and files; the longer ones are run by make soak.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs

from sparse_transformer import data, patterns
from sparse_transformer.data import codecs
from sparse_transformer.training import (
  checkpoint,
  loop as train,
  metrics,
  workdir as workdir_lib,
)
from sparse_transformer.training.experiment import Experiment

SETTINGS = {
  "model.dropout": 0.2,
  "train.accumulation": 2,
  "train.steps": 24,
  "train.log_every": 2,
  "eval.every": 4,
  "eval.sequences": 16,
  "checkpoint.every": 3,
  "checkpoint.keep": 3,
}


def words(workdir, **changes):
  """The command line of a tiny run."""
  config = runs.tiny(**SETTINGS | changes)
  settings = [
    f"--config.{group}.{name}={value}"
    for group in ("model", "train", "eval", "checkpoint", "optimizer")
    for name, value in config[group].to_dict().items()
  ]
  return [
    f"--config={runs.REPO / 'configs' / 'digits.py'}",
    *settings,
    f"--workdir={workdir}",
  ]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
  """Starts a command of its own process; compiled programs are shared."""
  cache = tmp_path_factory.mktemp("compiled")
  environment = os.environ | {
    "JAX_COMPILATION_CACHE_DIR": str(cache),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(runs.REPO),
  }

  def start(script, *line, **more):
    return subprocess.Popen(
      [sys.executable, runs.REPO / script, *line],
      cwd=runs.REPO,
      env=environment | more,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )

  return start


def finish(process, status=0, timeout=240):
  """What a process printed; it must end with a status."""
  output, _ = process.communicate(timeout=timeout)
  assert process.returncode == status, output
  return output


def without_speed(workdir):
  return [
    {k: v for k, v in line.items() if k != "tokens_per_second"}
    for line in metrics.read(workdir)
  ]


def of_split(workdir, split):
  return [line for line in metrics.read(workdir) if line["split"] == split]


def arrays(state):
  """All arrays of a state, as bytes."""
  return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def last_state(workdir):
  """All arrays of the last checkpoint, as bytes."""
  experiment = Experiment(config_lib.read_config(workdir))
  with checkpoint.Checkpoints(workdir) as checkpoints:
    return arrays(experiment.restore(checkpoints))


@pytest.fixture(scope="module")
def uncut(start, tmp_path_factory):
  """A run that nothing happened to."""
  workdir = tmp_path_factory.mktemp("uncut") / "run"
  finish(start("train.py", *words(workdir)))
  return workdir


def assert_equal(workdir, uncut):
  assert without_speed(workdir) == without_speed(uncut)
  assert last_state(workdir) == last_state(uncut)


# Signals.


def wait_for(process, text):
  """Reads what a process prints until a line holds `text`."""
  for line in process.stdout:
    if text in line:
      return
  raise AssertionError(f"it ended before it printed {text!r}")


@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.soak)])
def test_killed_runs_end_as_if_nothing_had_happened(
  kills, start, uncut, tmp_path
):
  rng, workdir = random.Random(kills), tmp_path / "run"
  for _ in range(kills):
    process = start("train.py", *words(workdir))
    reader = iter(process.stdout.readline, "")
    # A moment in steps, saves or evaluation: some lines and some time in.
    for _ in zip(range(rng.randrange(4)), reader, strict=False):
      pass
    time.sleep(rng.random() * 0.3)
    process.kill()
    process.communicate()
  finish(start("train.py", *words(workdir)))
  assert_equal(workdir, uncut)


@pytest.mark.parametrize(
  "phase, line",
  [
    ("compilation", None),
    ("evaluation", "step      12  train"),
    pytest.param("step", "step       2", marks=pytest.mark.soak),
    pytest.param("save", "step       6  train", marks=pytest.mark.soak),
  ],
)
@pytest.mark.parametrize(
  "number",
  [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)],
)
def test_signal_saves_and_the_run_goes_on(
  phase, line, number, start, uncut, tmp_path
):
  workdir = tmp_path / "run"
  process = start("train.py", *words(workdir))
  if line:
    wait_for(process, line)
  else:
    lock = workdir / "lock"
    while not (lock.exists() and lock.read_text()):
      time.sleep(0.01)
    time.sleep(0.2)
  began = time.monotonic()
  process.send_signal(number)
  output = finish(process, status=130)
  assert time.monotonic() - began < 30
  last = output.strip().splitlines()[-1]
  assert f"train.py: stopped: {signal.Signals(number).name} at step" in last
  saved = int(last.split("at step ")[1].split(",")[0])
  with checkpoint.Checkpoints(workdir) as checkpoints:
    assert checkpoints.steps()[-1] == saved
  finish(start("train.py", *words(workdir)))
  assert_equal(workdir, uncut)


# A call into C that lasts, as a compilation does.
SLOW = """
import hashlib, runpy, sys
sys.path[0] = {repo!r}
from sparse_transformer.training import metrics
def count(*_):
  print("busy", flush=True)
  hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
metrics.Throughput.count = count
sys.argv = {line!r}
runpy.run_path({repo!r} + "/train.py", run_name="__main__")
"""


def test_second_signal_ends_at_once(start, tmp_path):
  program = tmp_path / "slow.py"
  line = ["train.py", *words(tmp_path / "run")]
  program.write_text(SLOW.format(repo=str(runs.REPO), line=line))
  process = start(program)
  wait_for(process, "busy")
  time.sleep(1)  # or it is not in C yet
  process.send_signal(signal.SIGTERM)
  time.sleep(1)
  assert process.poll() is None  # the step in progress goes on
  process.send_signal(signal.SIGTERM)
  process.communicate(timeout=10)
  assert process.returncode == 128 + signal.SIGTERM


LISTENING = """
import runpy, sys
sys.path[0] = {repo!r}
from sparse_transformer.training import workdir
enter = workdir.Signals.__enter__
def tell(signals):
  enter(signals)
  print("listening", flush=True)
  return signals
workdir.Signals.__enter__ = tell
sys.argv = {line!r}
runpy.run_path({repo!r} + "/" + sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize(
  "line",
  [
    ["eval.py", "--split=train", "--config.eval.batch_size=1"],
    ["sparse_transformer/sample.py", "--num=2000", "--nocache"],
  ],
)
def test_signal_ends_a_command_that_reads(line, start, uncut, tmp_path):
  program = tmp_path / "listening.py"
  line = [*line, f"--workdir={uncut}"]
  program.write_text(LISTENING.format(repo=str(runs.REPO), line=line))
  before = runs.files(uncut)
  process = start(program)
  wait_for(process, "listening")
  time.sleep(random.random())
  process.send_signal(signal.SIGTERM)
  output = finish(process, status=130)
  assert "stopped: SIGTERM" in output and "Traceback" not in output
  assert runs.files(uncut) == before


@pytest.mark.parametrize(
  "number",
  [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.soak)],
)
def test_signal_ends_a_comparison_and_its_run(number, start, tmp_path):
  line = [
    "--vary=attention.pattern=local,dense",
    "--budget=steps:1000000",
    "--config.train.log_every=1",
  ]
  process = start(
    "sparse_transformer/compare.py", *words(tmp_path / "all"), *line
  )
  wait_for(process, "step       3")
  process.send_signal(number)
  output = finish(process, status=130)
  assert f"stopped: {signal.Signals(number).name} in" in output
  assert "Traceback" not in output
  workdir = tmp_path / "all" / "local" / "seed0"
  with workdir_lib.hold(workdir), checkpoint.Checkpoints(workdir) as saved:
    assert saved.steps()[-1] >= 3


# Damage.


def flip(content):
  middle = len(content) // 2
  return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """(a run with checkpoints of steps 1 and 2, the state at step 1)."""
  folder = tmp_path_factory.mktemp("saved") / "run"
  config = runs.tiny(**{"train.steps": 2, "checkpoint.every": 1})
  train.train(config, folder)
  experiment = Experiment(config)
  with checkpoint.Checkpoints(folder) as checkpoints:
    return folder, experiment.restore(checkpoints, 1)


@pytest.mark.parametrize("damage", ["flip", "cut", "delete"])
def test_damaged_checkpoint_is_set_aside_and_the_one_before_used(
  damage, saved, tmp_path, capsys
):
  run, before = saved
  like = jax.eval_shape(lambda: before)
  latest = run / "checkpoints" / "2"
  names = [
    file.relative_to(latest)
    for file in sorted(latest.rglob("*"))
    if file.is_file() and (damage == "delete" or file.stat().st_size)
  ]
  assert len(names) > 8
  for i, name in enumerate(names):
    folder = tmp_path / str(i)
    shutil.copytree(run, folder)
    file = folder / "checkpoints" / "2" / name
    if damage == "delete":
      file.unlink()
    else:
      content = file.read_bytes()
      broken = (
        flip(content) if damage == "flip" else content[: len(content) // 2]
      )
      file.write_bytes(broken)
    capsys.readouterr()
    with checkpoint.Checkpoints(folder, keep=2) as checkpoints:
      state = checkpoints.restore_last(like)
    told = capsys.readouterr().err
    assert arrays(state) == arrays(before), name
    assert f"{folder / 'checkpoints' / '2'} cannot be read" in told
    # A list of files that is damaged itself may blame another one.
    assert str(name) in told or name.name == checkpoint.FILES
    assert (folder / "checkpoints" / "damaged-2-0").is_dir()


def test_run_without_a_good_checkpoint_starts_anew(tmp_path, capsys):
  config = runs.tiny(**{"train.steps": 2})
  expected = train.train(config, tmp_path)
  for file in (tmp_path / "checkpoints" / "2" / "state").rglob("*"):
    if file.is_file():
      file.write_bytes(b"")
  found = train.train(config, tmp_path)
  assert "cannot be read" in capsys.readouterr().err
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_array_equal(x, y)


def test_golden_checkpoint_of_an_old_format_loads(tmp_path):
  golden = pathlib.Path(__file__).parents[1] / "golden" / "run.tar.gz"
  shutil.unpack_archive(golden, tmp_path, filter="data")
  workdir = tmp_path / "run"
  config = config_lib.read_config(workdir)
  with checkpoint.Checkpoints(workdir) as checkpoints:
    state = Experiment(config).restore(checkpoints)
  assert int(state.step) == 4
  expected = json.loads((workdir / "sums.json").read_text())
  found = {
    jax.tree_util.keystr(path): float(np.asarray(x, np.float64).sum())
    for path, x in jax.tree_util.tree_leaves_with_path(state.params)
  }
  assert found == expected


def test_checkpoint_says_what_it_is_of(tmp_path):
  config = runs.tiny(**{"train.steps": 2})
  train.train(config, tmp_path)
  path = tmp_path / "checkpoints" / "2" / "about" / "metadata"
  about = json.loads(path.read_text())
  assert about["config"]["train"]["steps"] == 2
  assert about["versions"]["jax"] == jax.__version__
  assert about["data"] == Experiment(config).source.digest()
  assert isinstance(about["validation"], float)


def test_best_checkpoint_is_kept_beside_the_last(tmp_path):
  state = Experiment(runs.tiny()).init()
  with checkpoint.Checkpoints(tmp_path, keep=2, keep_best=1) as checkpoints:
    for step, bits in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 1.5)):
      new = dataclasses.replace(state, step=jnp.asarray(step))
      checkpoints.save(new, bits)
      checkpoints.finish()
    assert checkpoints.steps() == [2, 4, 5]


# Bad numbers.


def bad_from(monkeypatch, steps, what):
  """Makes the training step of some steps give no number."""
  plain = Experiment.step

  def step(self, state, tokens_BL):
    new, measured = plain(self, state, tokens_BL)
    bad = jnp.isin(new.step, jnp.asarray(steps))
    if what == "batch":  # symbols that are none
      new, measured = plain(
        self, state, jnp.where(bad, jnp.uint8(200), tokens_BL)
      )
    elif what == "parameters":
      broken = jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), state.params)
      new, measured = plain(
        self, dataclasses.replace(state, params=broken), tokens_BL
      )
    return new, measured

  monkeypatch.setattr(Experiment, "step", step)


def test_bad_batch_stops_the_run_in_its_step(tmp_path, monkeypatch):
  config = runs.tiny(**{"train.steps": 9, "checkpoint.every": 1})
  bad_from(monkeypatch, [5], "batch")
  with pytest.raises(FloatingPointError) as error:
    train.train(config, tmp_path)
  text = str(error.value)
  assert "nats is nan at step 5" in text and "--replay=5" in text
  examples = data.batches(range(1397), 8, 0)[4].tolist()
  assert ", ".join(map(str, examples)) in text
  with checkpoint.Checkpoints(tmp_path) as checkpoints:
    assert checkpoints.steps()[-1] == 4
  # Without the fault the run goes on, and ends as if it had not been.
  monkeypatch.undo()
  found = train.train(config, tmp_path)
  expected = train.train(config, tmp_path.with_name("whole"))
  for x, y in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
    np.testing.assert_array_equal(x, y)


def test_bad_batch_is_skipped_and_counted(tmp_path, monkeypatch):
  config = runs.tiny(**{"train.steps": 6, "train.nonfinite": "skip"})
  bad_from(monkeypatch, [3, 5], "batch")
  state = train.train(config, tmp_path)
  skipped = of_split(tmp_path, "skipped")
  assert [line["step"] for line in skipped] == [3, 5]
  assert all(line["metric"] == "nats" for line in skipped)
  assert all(len(line["examples"]) == 8 for line in skipped)
  assert int(state.step) == 6
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
  trained = [line["step"] for line in of_split(tmp_path, "train")]
  assert trained == [1, 2, 4, 6]


def test_skipped_step_leaves_the_state_as_it_was(monkeypatch):
  experiment = Experiment(runs.tiny())
  bad_from(monkeypatch, [1], "batch")
  state = jax.jit(experiment.init)()
  batch = data.batches(experiment.source.examples("train"), 8, 0)[0]
  new, measured = jax.jit(experiment.step)(state, batch)
  assert np.isnan(measured["nats"]) and int(new.step) == 1
  for part in ("params", "opt_state", "ema"):
    trees = getattr(new, part), getattr(state, part)
    for x, y in zip(*map(jax.tree.leaves, trees), strict=True):
      np.testing.assert_array_equal(x, y)


def test_too_many_bad_batches_in_a_row_stop_the_run(tmp_path, monkeypatch):
  config = runs.tiny(
    **{"train.steps": 9, "train.nonfinite": "skip", "train.max_skipped": 2}
  )
  bad_from(monkeypatch, [2, 4, 5, 6], "batch")
  with pytest.raises(FloatingPointError, match="step 6, after 2 batches"):
    train.train(config, tmp_path)


def test_bad_parameters_stop_the_run_in_that_step(tmp_path, monkeypatch):
  config = runs.tiny(**{"train.steps": 9, "checkpoint.every": 2})
  bad_from(monkeypatch, [3], "parameters")
  with pytest.raises(FloatingPointError, match="nats is nan at step 3"):
    train.train(config, tmp_path)


def test_bad_gradient_stops_the_run_in_that_step(tmp_path, monkeypatch):
  from sparse_transformer.training import step as training

  plain = training.position_losses

  def losses(logits_BLV, tokens_BL):
    # The loss stays what it is; its gradient, sqrt at 0, is no number.
    first = logits_BLV[:, :1, 0]
    return plain(logits_BLV, tokens_BL) + 0 * jnp.sqrt(first - first)

  monkeypatch.setattr(training, "position_losses", losses)
  with pytest.raises(
    FloatingPointError, match="gradient_norm is nan at step 1"
  ):
    train.train(runs.tiny(), tmp_path)


def test_spike_is_put_down_with_its_batch(tmp_path, monkeypatch):
  plain = Experiment.step

  def step(self, state, tokens_BL):
    new, measured = plain(self, state, tokens_BL)
    factor = jnp.where(new.step == 3, 2.0, 1.0)
    return new, measured | dict(nats=measured["nats"] * factor)

  monkeypatch.setattr(Experiment, "step", step)
  train.train(runs.tiny(), tmp_path)
  (line,) = of_split(tmp_path, "spike")
  assert line["step"] == 3
  assert line["examples"] == data.batches(range(1397), 8, 0)[2].tolist()


def test_replay_computes_a_batch_and_writes_nothing(tmp_path, capsys):
  config = runs.tiny()
  train.train(config, tmp_path)
  before = runs.files(tmp_path)
  train.replay(config, tmp_path, 4)
  output = capsys.readouterr().out
  assert "step 4 with the weights of step 2" in output
  assert output.count("example ") == 8
  assert runs.files(tmp_path) == before


# Disks.


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 24 MiB."""
  folder = tmp_path / "small"
  folder.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder]
  if subprocess.run(mount, capture_output=True).returncode:
    pytest.skip("may not mount a file system here")
  yield folder
  subprocess.run(["umount", "-l", folder], check=True)


def fill(folder, leave=0):
  """Fills a file system but for some bytes."""
  # Without a buffer: closing the file would try to write the rest of it.
  with (folder / "filler").open("wb", buffering=0) as file:
    with contextlib.suppress(OSError):
      while True:
        file.write(bytes(2**14))
    file.truncate(file.tell() - leave)


# Orbax and TensorBoard write in threads, which end with an error.
@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnhandledThreadExceptionWarning",
  "ignore::pytest.PytestUnraisableExceptionWarning",
)
@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_full_disk_ends_the_run_or_not_and_keeps_what_there_is(
  on_error, small_disk, capfd
):
  workdir = small_disk / "run"
  few = runs.tiny(**{"train.steps": 2})
  train.train(few, workdir)
  good = last_state(workdir)
  fill(small_disk, leave=2**17)
  more = {"train.steps": 8, "checkpoint.on_error": on_error}
  path = workdir / "config.json"  # as if it had been for 8 steps
  settings = json.loads(path.read_text())
  settings["train"]["steps"] = 8
  path.write_text(json.dumps(settings))
  config = runs.tiny(**more)
  if on_error == "stop":
    with pytest.raises(OSError) as error:
      train.train(config, workdir)
    assert "\n" not in str(error.value)
    assert last_state(workdir) == good
  else:
    state = train.train(config, workdir)
    assert int(state.step) == 8
    assert "goes on without" in capfd.readouterr().err
  (small_disk / "filler").unlink()
  state = train.train(config, workdir)
  assert int(state.step) == 8 and last_state(workdir)


# Inputs.


def test_other_data_are_refused(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"some text " * 50)
  config = runs.text(path, **{"train.steps": 2})
  train.train(config, tmp_path / "run")
  path.write_bytes(b"same size " * 50)
  config.train.log_every = 2
  before = runs.files(tmp_path / "run" / "checkpoints")
  with pytest.raises(ValueError, match="run on other data"):
    train.train(config, tmp_path / "run")
  assert runs.files(tmp_path / "run" / "checkpoints") == before


def test_changed_pattern_is_allowed_and_put_down(tmp_path, capsys):
  config = runs.tiny(**{"train.steps": 4})
  train.train(config, tmp_path)
  config.attention.pattern = "local"
  train.train(config, tmp_path)
  assert (
    "attention.pattern was 'strided', is 'local'" in capsys.readouterr().err
  )
  (line,) = (tmp_path / "config_changes.jsonl").read_text().splitlines()
  expected = {"attention.pattern": ["strided", "local"]}
  assert json.loads(line) == {"step": 4, "changes": expected}
  assert config_lib.read_config(tmp_path).attention.pattern == "local"


def test_second_run_in_a_workdir_is_refused_by_name(start, tmp_path, capsys):
  workdir = tmp_path / "run"
  process = start("train.py", *words(workdir, **{"train.steps": 10**6}))
  wait_for(process, "step       2")
  with pytest.raises(ValueError) as error:
    train.train(runs.tiny(**SETTINGS | {"train.steps": 10**6}), workdir)
  assert f"in use by process {process.pid} on " in str(error.value)
  process.kill()
  process.communicate()
  with workdir_lib.hold(workdir):  # that of a dead process is free
    pass


def mutate(rng, content):
  """Random bytes, or some changed, cut, doubled or moved."""
  content = bytearray(content)
  for _ in range(rng.randrange(1, 6)):
    kind, place = rng.randrange(5), rng.randrange(len(content) + 1)
    if kind == 0 and content:
      content[place % len(content)] = rng.randrange(256)
    elif kind == 1:
      del content[place : place + rng.randrange(40)]
    elif kind == 2:
      content[place:place] = rng.randbytes(rng.randrange(9))
    elif kind == 3:
      content[place:place] = content[: rng.randrange(50)]
    else:
      content = content[:place]
  return bytes(content)


def small_files():
  """{name: (content, what reads it)} of the formats that we parse."""
  import bz2
  import gzip
  import io
  import lzma
  import zipfile

  import scipy.io.wavfile

  sound, archive = io.BytesIO(), io.BytesIO()
  scipy.io.wavfile.write(sound, 8000, np.arange(99, dtype=np.int16))
  with zipfile.ZipFile(archive, "w") as file:
    file.writestr("a", "text" * 20)
  config = json.dumps(runs.tiny().to_dict()).encode()

  def read_config(path):
    shutil.copy(path, path.parent / "config.json")
    return config_lib.read_config(path.parent)

  def decode(codec):
    return lambda path: codec.decode(path.read_bytes(), path)

  return {
    "x.fasta": (b">one\nACGTNRYacgt\n>two\nTTTT\n", decode(codecs.Fasta())),
    "x.wav": (sound.getvalue(), decode(codecs.Audio(12_000))),
    "text8": (b"some letters of text", decode(codecs.Letters())),
    "x.zip": (archive.getvalue(), files.read),
    "x.gz": (gzip.compress(b"text" * 20), files.read),
    "x.bz2": (bz2.compress(b"text" * 20), files.read),
    "x.xz": (lzma.compress(b"text" * 20), files.read),
    "x.json": (config, read_config),
    "pattern": (
      b"(Local(4), BigBird(8)), Strided(3) | Block(4) - Causal()",
      lambda path: patterns.parse(path.read_bytes().decode("latin1")),
    ),
  }


@pytest.mark.parametrize(
  "rounds", [100, pytest.param(1200, marks=pytest.mark.soak)]
)
@pytest.mark.filterwarnings("ignore")
def test_no_mutated_file_gives_a_traceback(rounds, tmp_path, capfd):
  rng = random.Random(rounds)
  for name, (content, read) in small_files().items():
    path = tmp_path / name
    path.write_bytes(content)
    read(path)
    for _ in range(rounds):
      path.write_bytes(mutate(rng, content))
      began = time.monotonic()
      try:
        read(path)
      except (ValueError, OSError) as error:
        assert str(error)
      assert time.monotonic() - began < 5


FLAGS = (
  "--config.train.steps=4",
  "--config.attention.cycle=1,0,0",
  "--config.attention.pattern=(Local(4), Block(8)), Strided(2)",
  "--config.optimizer.learning_rate=1e-3",
  "--config.model.half_size=True",
  "--config.data.fractions=0.8,0.1,0.1",
)


@pytest.mark.parametrize(
  "rounds", [30, pytest.param(600, marks=pytest.mark.soak)]
)
@pytest.mark.filterwarnings("ignore")
def test_no_mutated_flag_gives_a_traceback(rounds, capfd):
  rng = random.Random(rounds)
  config = f"--config={runs.REPO / 'configs' / 'digits.py'}"
  for _ in range(rounds):
    word = mutate(rng, rng.choice(FLAGS).encode()).decode("latin1")
    word = word.replace("\0", "")  # no command line can hold it
    # Without a workdir it ends behind the settings at the latest.
    assert runs.command("train.py", config, word) in (0, 1), word
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) <= 1 and "Traceback" not in "".join(lines), (word, lines)


# Devices and long runs.


@pytest.mark.soak
def test_run_goes_on_with_another_number_of_devices(start, tmp_path):
  changes = {"train.accumulation": 1, "model.dropout": 0.0, "train.steps": 8}
  process = start("train.py", *words(tmp_path / "run", **changes))
  wait_for(process, "step       4  validation")
  process.send_signal(signal.SIGTERM)
  finish(process, status=130)
  found = {}
  for devices in (1, 2, 4, 8):
    folder = tmp_path / str(devices)
    shutil.copytree(tmp_path / "run", folder)
    flag = f"--xla_force_host_platform_device_count={devices}"
    finish(start("train.py", *words(folder, **changes), XLA_FLAGS=flag))
    found[devices] = [line["nats"] for line in of_split(folder, "train")]
  for nats in found.values():
    np.testing.assert_allclose(nats, found[1], atol=1e-5)


LONG = """
import os, sys
sys.path[:0] = [{repo!r}, {tests!r}]
import jax, numpy as np, runs, train

steps, step, compiled, seen = 20_000, 0, [], []

def listen(name, *_, **__):
  if "backend_compile" in name:
    compiled.append(step)

jax.monitoring.register_event_duration_secs_listener(listen)
watch = train.Log.watch

def measure(log, done, measured):
  global step
  watch(log, done, measured)
  step = done
  if done % 500 == 250:
    with open("/proc/self/statm") as file:
      resident = int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    seen.append((resident, len(os.listdir("/proc/self/fd"))))

train.Log.watch = measure
train.train(runs.tiny(**{{
  "model.num_layers": 1, "train.steps": steps, "train.log_every": 100,
  "eval.every": 1000, "checkpoint.every": 1000,
}}), {workdir!r})
# The first saves and validations fill what is kept for the next ones.
before, after = (np.median(part, 0) for part in (seen[8:12], seen[-4:]))
print(f"memory at step 5,000 and 19,000: {{before[0] / 2**20:.1f}} MiB,"
      f" {{after[0] / 2**20:.1f}} MiB; open files: {{before[1]:g}},"
      f" {{after[1]:g}}; compilations behind steps {{compiled}}")
assert after[0] <= 1.02 * before[0]
assert after[1] <= before[1]
# The start, the first step, and the first validation.
assert set(compiled) <= {{0, 1000}}
"""


@pytest.mark.soak
def test_long_run_stays_as_it_is(tmp_path, capfd):
  program = LONG.format(
    repo=str(runs.REPO),
    tests=str(runs.REPO / "tests"),
    workdir=str(tmp_path / "run"),
  )
  done = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr[-2000:]
  with capfd.disabled():
    print("\n" + done.stdout.splitlines()[-1])
