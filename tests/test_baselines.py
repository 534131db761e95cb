"""Baselines: counts, compressors, codecs, linear prediction; clips."""

import importlib.util
import json
import lzma
import math

import numpy as np
import pytest
from helpers import runs

from benchmarks import baselines, counts, linear, video
from sparse_transformer import data as data_lib

pytestmark = pytest.mark.tools


def test_error_over_blocks_is_that_of_their_means():
  values = np.random.default_rng(0).normal(size=500)
  means = values.reshape(5, 100).mean(1)
  mean, error = linear.mean_and_error(values, 100)
  assert mean == pytest.approx(values.mean())
  assert error == pytest.approx(means.std(ddof=1) / math.sqrt(5))
  assert linear.mean_and_error(values, 500)[1] is None


def test_independent_positions_score_the_entropy_of_their_values():
  rng = np.random.default_rng(0)
  first = 0.5, 0.25, 0.25
  second = 0.9, 0.1, 0.0

  def draw():
    return np.stack([rng.choice(3, 20_000, p=p) for p in (first, second)], 1)

  splits = {split: draw() for split in data_lib.SPLITS}
  row = baselines.independent(splits, size=3)

  entropy = -sum(p * np.log2(p) for p in (*first, *second) if p) / 2

  assert row["test"] == pytest.approx(entropy, abs=0.02)
  assert row["validation"] == pytest.approx(entropy, abs=0.02)


def score(config, data, folder):
  """The record that the command writes."""
  out = folder / "out" / "baselines.json"
  words = (
    f"--config={runs.REPO}/configs/{config}.py",
    f"--out={out}",
    f"--config.data.path={data}",
  )
  assert runs.command("benchmarks/baselines.py", *words) == 0

  assert str(folder) not in out.read_text()
  record = json.loads(out.read_text())
  return record, {row["model"]: row for row in record["rows"]}


def test_compressors_are_given_the_training_split(tmp_path, capsys):
  data = tmp_path / "text.txt"
  text = np.random.default_rng(0).integers(32, size=5_000).astype(np.uint8)
  data.write_bytes(text.tobytes() * 4)  # the test split repeats the rest
  lacks = importlib.util.find_spec("pyppmd") is None
  record, rows = score("text_small", data, tmp_path)

  assert record["symbols"] == dict(
    train=18_000,
    validation=1_000,
    test=1_000,
  )
  assert ("pip install pyppmd" in capsys.readouterr().out) == lacks

  for name in baselines.COMPRESSORS:
    if lacks and "PPMd" in name:
      assert f"`{name}`" not in rows
    else:
      assert rows[f"`{name}`"]["test"] < 2.5, name

  whole = (text.tobytes() * 4)[:18_000]

  assert rows["`xz -9e`"]["test"] < 8 * len(lzma.compress(whole)) / 18_000


def colors(number, seed=0):
  """Smooth images of 6 x 5 pixels with three channels of 16 levels."""
  rng = np.random.default_rng(seed)
  images = rng.normal(size=(number, 6, 5, 3)).cumsum(1).cumsum(2)
  return (images + 8).clip(0, 15).astype(np.uint8).reshape(number, -1)


@pytest.mark.parametrize("near", linear.NEIGHBORS, ids=len)
def test_linear_prediction_is_a_distribution_given_what_is_before(near):
  bits_of = linear.fit(colors(200), near, (6, 5, 3), 16)
  # G, and not at an edge
  image = colors(1, seed=1)[0]
  position = 49
  others = np.repeat(image[None], 16, axis=0)
  others[:, position] = range(16)
  bits = bits_of(others)

  assert np.exp2(-bits[:, position]).sum() == pytest.approx(1)
  assert (bits[:, :position] == bits[0, :position]).all()
  assert (bits[1:, position + 3] != bits[0, position + 3]).any()


def test_linear_prediction_of_images_beats_independent_positions():
  splits = {x: colors(300, i) for i, x in enumerate(data_lib.SPLITS)}
  independent = baselines.independent(splits, 16)["test"]
  for row in linear.score(splits, data_lib.Images((6, 5, 3), 16, dict)):
    assert 0 < row["test"] < independent - 0.3
    assert row["test"] == pytest.approx(row["validation"], abs=0.1)
    assert row["standard_error"] < 0.05


def moving(frames=32, seed=0):
  """A gray video of 33 x 50 pixels that moves to the right."""
  wide = np.random.default_rng(seed).normal(size=(33, 50 + frames)).cumsum(0)
  wide = (128 + 9 * wide).clip(0, 255).astype(np.uint8)
  return np.stack([wide[:, frames - t :][:, :50] for t in range(frames)])


def test_clips_are_frames_one_below_the_other_in_the_order_of_time():
  frames = moving()
  clips = video.cut(frames, 16)

  assert clips.shape == (2 * 2 * 3, 256, 16)
  t = 5
  row = 1
  column = 2
  y = 3
  x = 7
  clip = clips[6 + 3 * row + column]

  assert clip[16 * t + y, x] == frames[16 + t, 16 * row + y, 16 * column + x]
  assert (video.cut(frames, 4)[0] == clips[0, :64]).all()
  assert video.shrunk(frames, 4)[3, 2, 1] == np.rint(
    frames[3, 8:12, 4:8].mean()
  )
  noise = video.noisy(np.full_like(frames, 100), 2) - 98
  assert set(noise.ravel()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
  "words, line",
  [
    (["a.avi"], "give a video"),
    (["a.avi", "b.npy"], "a.avi"),
  ],
)
def test_clips_need_a_video_that_can_be_read(words, line, capsys):
  assert runs.command("benchmarks/video.py", *words) == 1
  assert line in capsys.readouterr().err.splitlines()[-1]


def test_linear_prediction_of_clips_sees_the_frame_before():
  splits = {
    x: video.cut(moving(48, i), 16) for i, x in enumerate(data_lib.SPLITS)
  }
  splits = {x: clips.reshape(len(clips), -1) for x, clips in splits.items()}
  source = data_lib.Images((256, 16, 1), 256, dict)
  *near, clip = (x["test"] for x in linear.score(splits, source))
  assert clip < min(near) - 0.5


CLIPS = data_lib.Images((256, 16, 1), 256, dict)


def test_counts_of_clips_score_the_entropy_of_their_changes():
  """A random first frame, and changes of -1, 0 and 1 that are independent."""
  rng = np.random.default_rng(0)
  p = [0.25, 0.5, 0.25]

  def frames(number):
    return np.concatenate(
      [
        rng.integers(100, 150, (number, 1, 256)),
        rng.choice([-1, 0, 1], (number, 15, 256), p=p),
      ],
      axis=1,
    )

  sizes = dict(
    train=200,
    validation=20,
    test=20,
  )
  splits = {
    split: frames(number).cumsum(1).reshape(number, -1).astype(np.uint8)
    for split, number in sizes.items()
  }
  rows = counts.score(splits, CLIPS)

  assert [row["model"] for row in rows] == [
    f"counts, {number} contexts" for number in ("256", "289", "4,913")
  ]
  for row in rows:
    assert row["test"] == pytest.approx(1.5, abs=0.05)
    assert row["validation"] == pytest.approx(1.5, abs=0.05)
    assert row["copied"] == pytest.approx(0.5, abs=0.01)


def test_counts_of_clips_are_a_distribution_given_what_is_before():
  clips = video.cut(moving(32), 16)
  clips = clips.reshape(len(clips), -1)
  train = counts.changes(clips, CLIPS)
  others = np.repeat(clips[:1], 256, axis=0)
  position = 256 * 7 + 16 * 3 + 5
  others[:, position] = range(256)
  found = counts.changes(others, CLIPS)
  for number in train.contexts:
    table = counts.count(train, number, 256)
    bits = counts.bits_of(table, found, number).reshape(256, -1)
    at = position - 256  # the first frame is not scored
    assert np.exp2(-bits[:, at]).sum() == pytest.approx(1)
    assert (bits[:, :at] == bits[0, :at]).all()
    assert (bits[1:, at + 256] != bits[0, at + 256]).any()


def test_video_codecs_code_clips_without_loss():
  av = pytest.importorskip("av")
  frames = moving(16).transpose(1, 2, 0)[:32, :48]
  for name, options in baselines.VIDEO_CODECS.values():
    packets = baselines.coded(frames, name, options)
    if name == "libx264":  # FFV1's header is not in its packets
      decoder = av.CodecContext.create("h264", "r")
      found = [y for x in [*packets, None] for y in decoder.decode(x)]
      decoded = [x.to_ndarray()[:32] for x in found]  # color is below
      assert (np.stack(decoded, axis=-1) == frames).all()


def test_codecs_code_a_mosaic_without_loss():
  imagecodecs = pytest.importorskip("imagecodecs")
  images = colors(7).reshape(-1, 6, 5, 3)
  mosaic = baselines.mosaic(images)

  assert mosaic.shape == (18, 15, 3)
  assert (mosaic[6:12, 5:10] == images[4]).all()
  assert not mosaic[12:, 5:].any()

  splits = {x: images for x in data_lib.SPLITS}
  rows = baselines.codecs(splits, images.shape[1:])
  for row, (codec, options) in zip(
    rows, baselines.CODECS.values(), strict=True
  ):
    content = getattr(imagecodecs, f"{codec}_encode")(mosaic, **options)
    assert row["test"] == 8 * len(content) / images.size
    decoded = getattr(imagecodecs, f"{codec}_decode")(content)
    assert (decoded == mosaic).all(), codec
