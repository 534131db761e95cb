"""Every result is reproduced by the command that it names, whatever came then.

A random run is trained, changed, scored, sampled, drawn and exported.
"""

import html
import json
import random
import shlex
import shutil

import pytest
from helpers import runs
from helpers.cases import soak
from safetensors import safe_open

NAMES = "sample", "explain", "report", "export"
SAMPLE, EXPLAIN, REPORT, EXPORT = (f"sparse_transformer/{x}.py" for x in NAMES)
PATTERNS = "strided", "local", "Local(5) | Global(2)"
OVERRIDE = "--config.attention.pattern=Local(2)"
COMMON = {
  "checkpoint.keep": 9,
  "eval.every": 1,
  "train.steps": 2,
}


def contents(folder):
  """What is in files, but not which process holds a run."""
  found = runs.files(folder)
  for path in folder.glob("*.safetensors"):  # its fields have no order
    with safe_open(path, "numpy") as file:
      found[path.name] = file.metadata()  # with a CRC-32 of all
  return {x: y for x, y in found.items() if not x.endswith("/lock")}


def differing(folder, before):
  after = contents(folder)
  return [x for x in {**after, **before} if after.get(x, 0) != before.get(x, 0)]


class Story:
  """A run, what was done to it, and what made its steps."""

  def __init__(self, seed, folder):
    self.rng = random.Random(seed)
    self.folder = folder
    self.run = folder / "run"
    self.is_text = bool(seed % 2)
    self.settings = dict(COMMON)
    if self.is_text:
      (folder / "text").write_bytes(b"to be or not to be, that is " * 20)
      text = {
        "data.name": "bytes",
        "data.path": str(folder / "text"),
        "data.length": 16,
        "data.columns": 8,
      }
      self.settings |= text | {
        "attention.stride": 4,
        "attention.window": 4,
      }

    self.pattern_of = {}
    self.trained = []

  def command(self, script, *words):
    """Runs a command; one that is refused leaves everything as it was."""
    before = contents(self.folder)
    status = runs.command(script, f"--workdir={self.run}", *words)
    assert status in (0, 1)
    assert status == 0 or not differing(self.folder, before)
    return status == 0

  def train(self, **changes):
    settings = self.settings | changes
    words = runs.DIGITS, *runs.flags_of(**settings), "--allow_changes"
    if self.command("train.py", *words):
      self.settings = settings
      self.trained.append(words)
      for step in range(settings["train.steps"] + 1):
        self.pattern_of.setdefault(step, settings.get("attention.pattern"))

  def go_on(self):
    steps = self.settings["train.steps"] + self.rng.randrange(3)
    pattern = {"attention.pattern": self.rng.choice(PATTERNS)}
    rate = {"optimizer.learning_rate": self.rng.choice((0.001, 0.01))}
    change = self.rng.choice(({}, pattern, rate, pattern | {"train.seed": 3}))
    self.train(**{"train.steps": steps} | change)

  def score(self):
    pick = self.rng.choice
    context = "--min_context=0,3" if self.is_text else "--min_context=0"
    words = pick((context, "--weights=params", "--split=validation"))
    step = pick(("--step=all", "--step=best", "--step=2", "--split=test"))
    override = pick(("attention.pattern=Local(2)", "model.dtype=bfloat16"))
    free = "attention.backend=dense", "eval.batch_size=5", "train.seed=7"
    override = pick((override, pick(free), "data.length=8", None))
    more = [f"--config.{override}"] if override else []
    self.command("eval.py", *dict.fromkeys((words, step)), *more)

  def sample(self):
    words = self.rng.choice((["--seed=3"], [], ["--temperature", "0.5"]))
    words += self.rng.choice(([], ["--step", "2"], [OVERRIDE]))
    assert self.command(SAMPLE, "--num=2", *words)

  def draw(self):
    words = self.rng.choice(([], ["--step=2"], [OVERRIDE]))
    assert self.command(EXPLAIN, "--example=1", *words)

  def export(self):
    name = f"{self.rng.randrange(9)}.safetensors"
    override = self.rng.choice(("attention.pattern=dense", "mesh.data=1"))
    words = self.rng.choice(([], ["--step=2"], [f"--config.{override}"]))
    self.command(EXPORT, f"--out={self.folder / name}", *words)

  def report(self):
    """Its table has the numbers of the files, and what they name."""
    assert self.command(REPORT)
    page = html.unescape((self.run / "report.html").read_text())
    for result in self.results().values():
      row = f"<td>{result['bits_per_dim']:.4f} {result['unit']}</td>"
      assert row in page
      assert f"<td>{result['command']}</td>" in page
    assert not self.command(REPORT, "--config.attention.pattern=dense")

  def results(self):
    paths = (self.run / "evaluations").glob("*.json")
    return {path: json.loads(path.read_text()) for path in paths}

  def named(self):
    found = [x["command"] for x in self.results().values()]
    for name in "samples.json", "attention/attention.json":
      if (path := self.run / name).exists():
        found.append(json.loads(path.read_text())["command"])
    for path in self.folder.glob("*.safetensors"):
      with safe_open(path, "numpy") as file:
        config = json.loads(file.metadata()["config"])
        pattern = self.pattern_of[int(file.metadata()["step"])]
        assert config["attention"]["pattern"] == pattern

    return found


@pytest.mark.parametrize("seed", [0, *map(soak, range(1, 41))])
def test_results_are_reproduced_by_the_commands_that_they_name(
  seed, tmp_path, shared_experiments
):
  story = Story(seed, tmp_path)
  story.train(**{"attention.pattern": "strided"})
  deeds = story.score, story.sample, story.draw, story.export, story.report
  for _ in range(2 if seed else 1):
    for deed in story.rng.sample(deeds, 2):
      deed()
    story.go_on()

  story.score()
  story.report()
  for result in story.results().values():
    own = result["config"]["attention"]["pattern"]
    changes = result["overrides"]
    trained = story.pattern_of[result["step"]]
    assert own == changes.get("attention.pattern", trained)

  before = contents(tmp_path)
  for command in story.named():
    python, script, *words = shlex.split(command)
    assert python == "python"
    assert runs.command(script, *words) == 0

  story.report()

  assert not differing(tmp_path, before)
  # The same commands of training give the same run.
  first = story.run
  metrics = runs.without_speed(story.run)
  story.run = tmp_path / "new"

  for words in story.trained:
    assert story.command("train.py", *words)
  assert runs.without_speed(story.run) == metrics
  configs = [(x / "config.json").read_text() for x in (first, story.run)]
  assert configs[0] == configs[1]
  shutil.rmtree(tmp_path)
