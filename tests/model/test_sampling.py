"""Tests of sampling.py and its command."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import runs
from PIL import Image

from sparse_transformer.model import kv_cache as cache, sampling
from sparse_transformer.training import loop as train
from sparse_transformer.training.experiment import Experiment


@pytest.fixture(scope="module")
def network():
  """(experiment, params) of a random network over 17 symbols."""
  experiment = Experiment(runs.tiny())
  params = jax.jit(experiment.init)().params
  shape = params["logits"]["kernel"].shape
  params["logits"]["kernel"] = jax.random.normal(jax.random.key(1), shape)
  return experiment, params


def draw(apply, params, *, length, **options):
  """Sequences drawn the plain way."""
  decoder = sampling.Recompute(apply, length)
  return sampling.sample(decoder, params, length=length, **options)[0]


def test_temperature_zero_takes_the_best_symbol_step_by_step(network):
  experiment, params = network
  apply = experiment.apply
  found = draw(apply, params, num=2, length=12, temperature=0.0)
  expected = np.zeros((2, 12), np.uint8)
  for t in range(12):
    expected[:, t] = np.asarray(apply(params, expected))[:, t].argmax(-1)
  np.testing.assert_array_equal(found, expected)
  assert found.dtype == np.uint8
  assert len(np.unique(found)) > 1


def test_samples_follow_from_their_seed(network):
  experiment, params = network

  def of_seed(seed):
    return draw(experiment.apply, params, num=3, length=16, seed=seed)

  np.testing.assert_array_equal(of_seed(1), of_seed(1))
  assert (of_seed(1) != of_seed(2)).any()
  one = of_seed(1)
  assert (one[0] != one[1]).any()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_symbols_are_drawn_from_the_softmax(temperature):
  logits = np.random.RandomState(0).normal(size=5).astype(np.float32)

  def apply(params, tokens_BL):
    return jnp.broadcast_to(params, (*tokens_BL.shape, 5))

  num = 20_000
  found = draw(
    apply, logits[None, None], num=num, length=2, temperature=temperature
  )
  p = np.exp(logits / temperature)
  p /= p.sum()
  for t in range(2):
    share = np.bincount(np.asarray(found[:, t]), minlength=5) / num
    assert np.all(abs(share - p) < 5 * np.sqrt(p * (1 - p) / num))
  # Neighbours are drawn independently of each other.
  joint = np.mean((found[:, 0] == 0) & (found[:, 1] == 0))
  assert abs(joint - p[0] ** 2) < 5 * p[0] / np.sqrt(num)


def test_symbols_are_drawn_given_those_before():
  def apply(params, tokens_BL):  # each symbol is the one before plus one
    before = jnp.pad(tokens_BL.astype(jnp.int32), ((0, 0), (1, 0)))[:, :-1]
    return 1e3 * jax.nn.one_hot((before + 1) % 7, 7)

  found = draw(apply, {}, num=2, length=9)
  np.testing.assert_array_equal(found, [[1, 2, 3, 4, 5, 6, 0, 1, 2]] * 2)


@pytest.mark.parametrize(
  "options, words",
  [
    (dict(num=0), "num=0"),
    (dict(temperature=-1), "temperature=-1"),
    (dict(temperature=float("nan")), "temperature=nan"),
    (dict(top_k=-1), "top_k=-1"),
    (dict(top_p=0.0), "top_p=0.0"),
    (dict(top_p=1.1), "top_p=1.1"),
    (dict(prompts=np.zeros((1, 5), np.uint8)), "prompt of 5 positions"),
  ],
)
def test_senseless_requests_are_errors(options, words):
  with pytest.raises(ValueError, match=words):
    draw(lambda *_: 0, {}, **dict(num=1, length=4) | options)


def test_samples_are_the_same_with_a_cache(network):
  experiment, params = network
  length = experiment.source.length
  prompts = np.arange(20, dtype=np.uint8).reshape(4, 5) % 17
  options = dict(num=4, length=length, prompts=prompts, seed=3, top_k=9)
  found, expected = (
    sampling.sample(decoder, params, **options)[0]
    for decoder in (
      cache.Decoder(experiment.model),
      sampling.Recompute(experiment.apply, length),
    )
  )
  np.testing.assert_array_equal(found, expected)
  np.testing.assert_array_equal(found[:, :5], prompts)
  assert len(np.unique(found[:, 5:])) > 3


def test_chunks_change_nothing(network, monkeypatch):
  experiment, params = network
  decoder = cache.Decoder(experiment.model)
  whole = sampling.sample(decoder, params, num=2, length=64)[0]
  monkeypatch.setattr(sampling, "CHUNK", 10)
  parts = sampling.sample(decoder, params, num=2, length=64)[0]
  np.testing.assert_array_equal(whole, parts)


@pytest.mark.parametrize(
  "options, drawn",
  [
    (dict(top_k=1), [4]),
    (dict(top_k=2), [3, 4]),
    (dict(top_p=0.44), [4]),
    (dict(top_p=0.5), [3, 4]),
    (dict(top_p=0.8), [1, 3, 4]),
    (dict(top_k=2, top_p=0.55), [4]),  # 0.45 / 0.75 reach it
    (dict(temperature=10.0, top_k=3), [1, 3, 4]),
    (dict(top_k=9), [0, 1, 2, 3, 4]),
  ],
)
def test_top_symbols_are_drawn_in_their_proportions(options, drawn):
  p = np.array([0.05, 0.15, 0.05, 0.3, 0.45])
  num = 20_000
  logits = jnp.broadcast_to(jnp.log(p), (num, 5))
  found = np.asarray(sampling.choose(logits, jax.random.key(0), **options))
  share = np.bincount(found, minlength=5) / num
  expected = np.where(np.isin(np.arange(5), drawn), p, 0)
  expected = expected ** (1 / options.get("temperature", 1))
  expected /= expected.sum()
  assert np.all(abs(share - expected) <= 5 * np.sqrt(expected / num))


def test_command_writes_text(tmp_path):
  path = tmp_path / "text"
  path.write_bytes(b"some text " * 50)
  config = runs.text(path, **{"train.steps": 0, "model.num_layers": 1})
  train.train(config, tmp_path / "run")
  words = [f"--workdir={tmp_path / 'run'}", "--num=3"]
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  text = (tmp_path / "run" / "samples.txt").read_bytes()
  assert len(text) == 3 * 32 + 2 * len("\n\n")


def test_command_writes_images_beside_real_ones(tmp_path):
  config = runs.tiny(**{"train.steps": 0, "model.num_layers": 1})
  train.train(config, tmp_path)
  words = [f"--workdir={tmp_path}", "--num=4", "--seed=1"]
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  with Image.open(tmp_path / "samples.png") as image:
    # Two sheets of 2 x 2 images, each with a line, and a gap of half an image.
    width, height = 2 * 2 * 9 + 4, 2 * 9
    assert image.width % width == 0
    assert image.height * width == image.width * height
    assert len(image.getcolors()) > 2


@pytest.fixture
def run_of(tmp_path):
  """Makes an untrained run on a data source: its workdir."""

  def make(**settings):
    config = runs.tiny(**{"train.steps": 0, "model.num_layers": 1} | settings)
    train.train(config, tmp_path / "run")
    return tmp_path / "run"

  return make


def of_files(name, path):
  return {
    "data.name": name,
    "data.path": str(path),
    "data.length": 32,
    "data.columns": 8,
    "data.fractions": (0.5, 0.25, 0.25),
  }


def test_command_goes_on_with_a_text(tmp_path, run_of):
  (tmp_path / "text").write_bytes(b"some text " * 50)
  workdir = run_of(**of_files("bytes", tmp_path / "text"))
  (tmp_path / "prompt").write_bytes(b"Once upon ")
  words = f"--workdir={workdir}", "--num=2", f"--prompt={tmp_path / 'prompt'}"
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  text = (workdir / "samples.txt").read_bytes()
  assert text.startswith(b"Once upon ") and text[34:].startswith(b"Once upon ")
  assert text[10:32] != text[44:]


def test_command_completes_real_images(run_of):
  workdir = run_of()
  words = f"--workdir={workdir}", "--num=4", "--given=40"
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  with Image.open(workdir / "samples.png") as image:
    pixels = np.asarray(image.convert("L"))
  # Sheets of 2 x 2 images of 9 cells, the gap between them 4 cells wide.
  scale = pixels.shape[0] // 18
  cells = pixels[scale // 2 :: scale, scale // 2 :: scale]
  drawn, real = cells[:, :18], cells[:, 22:]
  for row in (0, 9):
    np.testing.assert_array_equal(drawn[row : row + 5], real[row : row + 5])
    assert (drawn[row + 5 : row + 8] != real[row + 5 : row + 8]).any()


def test_command_writes_bases(tmp_path, run_of):
  (tmp_path / "x.fasta").write_bytes(b">x\n" + b"ACGTTGCA" * 50)
  workdir = run_of(**of_files("fasta", tmp_path / "x.fasta"))
  words = f"--workdir={workdir}", "--num=2"
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  lines = (workdir / "samples.fasta").read_text().splitlines()
  assert lines[::2] == [">sample_0", ">sample_1"]
  assert all(
    len(line) == 32 and set(line) <= set("ACGT") for line in lines[1::2]
  )


def test_command_writes_sound(tmp_path, run_of):
  import scipy.io.wavfile

  (tmp_path / "sound").mkdir()
  noise = np.random.RandomState(0).randint(-9999, 9999, 2000).astype(np.int16)
  scipy.io.wavfile.write(tmp_path / "sound" / "x.wav", 24_000, noise)
  (tmp_path / "sound" / "notes.txt").write_text("not a sound")
  workdir = run_of(**of_files("audio", tmp_path / "sound"))
  words = f"--workdir={workdir}", "--num=2"
  assert runs.command("sparse_transformer/sample.py", *words) == 0
  for i in range(2):
    rate, wave = scipy.io.wavfile.read(workdir / f"samples_{i}.wav")
    assert (rate, len(wave)) == (12_000, 32)


@pytest.mark.parametrize(
  "words, message",
  [
    (["--given=65"], "--given=65 must lie between 1 and the 64"),
    (["--given=-1"], "--given=-1"),
    (["--prompt=x"], "--prompt is for text"),
    (["--given=3", "--prompt=x"], "exclude each other"),
    (["--top_p=0"], "top_p=0"),
    (["--num=0"], "--num=0"),
  ],
)
def test_mistakes_are_one_line(words, message, run_of, capsys):
  workdir = run_of()
  before = runs.files(workdir)
  word = f"--workdir={workdir}"
  assert runs.command("sparse_transformer/sample.py", word, *words) == 1
  error = capsys.readouterr().err
  assert message in error and error.count("\n") == 1
  assert runs.files(workdir) == before


@pytest.mark.parametrize("size", [0, 33])
def test_prompt_that_does_not_fit_is_one_line(size, tmp_path, run_of, capsys):
  (tmp_path / "text").write_bytes(b"some text " * 50)
  workdir = run_of(**of_files("bytes", tmp_path / "text"))
  (tmp_path / "prompt").write_bytes(b"x" * size)
  words = f"--workdir={workdir}", f"--prompt={tmp_path / 'prompt'}"
  assert runs.command("sparse_transformer/sample.py", *words) == 1
  assert f"has {size} symbols; a prompt has between" in capsys.readouterr().err
