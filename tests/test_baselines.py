"""Baselines: counts, compressors, codecs, linear prediction; clips."""

import importlib.util
import json
import lzma
import math

import numpy as np
import pytest
from helpers import runs
from scipy import stats

from benchmarks import baselines, counts, linear, video
from sparse_transformer import data as data_lib

pytestmark = pytest.mark.tools
# Of gray clips: 16 frames of 16 x 16, one below the other.
CLIPS = data_lib.Images((256, 16, 1), 256, dict)


def test_error_over_blocks_is_that_of_their_means():
  values = np.random.default_rng(0).normal(size=500)
  means = values.reshape(5, 100).mean(1)
  mean, error = linear.mean_and_error(values, 100)
  assert mean == pytest.approx(values.mean())
  assert error == pytest.approx(means.std(ddof=1) / math.sqrt(5))
  assert linear.mean_and_error(values, 500)[1] is None


def every_level(sequence, position, levels):
  """The sequence with each level in turn at a position."""
  others = np.repeat(sequence[None], levels, axis=0)
  others[:, position] = range(levels)
  return others


def assert_distribution(bits, position):
  """Checks bits of `every_level`: what is before a position is given."""
  assert np.exp2(-bits[:, position]).sum() == pytest.approx(1)
  assert (bits[:, :position] == bits[0, :position]).all()


def test_independent_positions_score_the_entropy_of_their_values():
  random = np.random.default_rng(0)
  first = [0.5, 0.25, 0.25]
  second = [0.9, 0.1, 0.0]

  def draw(p):
    return random.choice(3, 20_000, p=p)

  splits = {}
  for split in data_lib.SPLITS:
    splits[split] = np.stack([draw(first), draw(second)], axis=1)
  row = baselines.independent(splits, size=3)
  bits = stats.entropy(
    [first, second],
    base=2,
    axis=1,
  )
  assert row["test"] == pytest.approx(bits.mean(), abs=0.02)
  assert row["validation"] == pytest.approx(bits.mean(), abs=0.02)


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
  content = text.tobytes() * 4  # the test split repeats the rest
  data.write_bytes(content)
  lacks = importlib.util.find_spec("pyppmd") is None
  record, rows = score("text_small", data, tmp_path)
  sizes = dict(train=18_000, validation=1_000, test=1_000)
  assert record["symbols"] == sizes
  assert ("pip install pyppmd" in capsys.readouterr().out) == lacks

  for name in baselines.COMPRESSORS:
    if lacks and "PPMd" in name:
      assert f"`{name}`" not in rows
    else:
      assert rows[f"`{name}`"]["test"] < 2.5, name

  bits_of_training = 8 * len(lzma.compress(content[:18_000])) / 18_000
  assert rows["`xz -9e`"]["test"] < bits_of_training

  # Within a window nothing repeats: 32 symbols take 5 bits.
  for name in baselines.ALONE:
    if not (lacks and "PPMd" in name):
      assert rows[f"`{name}`, window alone"]["test"] > 4.9, name

  # Two bytes are enough to know the place in the text, and what follows.
  assert rows["counts after a byte"]["test"] > 4
  assert rows["counts after up to 7 bytes"]["test"] < 1
  assert rows[baselines.COPIES]["matches"]["found"] < 0.01


def colors(number, seed=0):
  """Smooth images of 6 x 5 pixels with three channels of 16 levels."""
  random = np.random.default_rng(seed)
  images = random.normal(size=(number, 6, 5, 3)).cumsum(1).cumsum(2)
  levels = (images + 8).clip(0, 15).astype(np.uint8)
  return levels.reshape(number, -1)


@pytest.mark.parametrize("near", linear.NEIGHBORS, ids=len)
def test_linear_prediction_is_a_distribution_given_what_is_before(near):
  bits_of = linear.fit(colors(200), near, (6, 5, 3), 16)
  image = colors(1, seed=1)[0]
  position = 49  # G, and not at an edge
  bits = bits_of(every_level(image, position, 16))
  assert_distribution(bits, position)
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
  random = np.random.default_rng(seed)
  wide = random.normal(size=(33, 50 + frames)).cumsum(0)
  wide = (128 + 9 * wide).clip(0, 255).astype(np.uint8)
  starts = range(frames, 0, -1)
  return np.stack([wide[:, start : start + 50] for start in starts])


def clips_of(frames):
  clips = video.cut(frames, 16)
  return clips.reshape(len(clips), -1)


def test_clips_are_frames_one_below_the_other_in_the_order_of_time():
  frames = moving()
  clips = video.cut(frames, 16)
  assert clips.shape == (2 * 2 * 3, 256, 16)

  t = 5
  row = 1
  column = 2
  of_clip = clips[6 + 3 * row + column].reshape(16, 16, 16)
  rows = slice(16 * row, 16 * row + 16)
  columns = slice(16 * column, 16 * column + 16)
  assert (of_clip[t] == frames[16 + t, rows, columns]).all()
  assert (video.cut(frames, 4)[0] == clips[0, :64]).all()
  mean = frames[3, 8:12, 4:8].mean()
  assert video.shrunk(frames, 4)[3, 2, 1] == np.rint(mean)
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
  splits = {}
  for seed, split in enumerate(data_lib.SPLITS):
    splits[split] = clips_of(moving(48, seed))
  *near, clip = (row["test"] for row in linear.score(splits, CLIPS))
  assert clip < min(near) - 0.5


def test_counts_of_clips_score_the_entropy_of_their_changes():
  """A random first frame, and changes of -1, 0 and 1 that are independent."""
  random = np.random.default_rng(0)

  def clips(number):
    first = random.integers(100, 150, (number, 1, 256))
    p = [0.25, 0.5, 0.25]
    changes = random.choice([-1, 0, 1], (number, 15, 256), p=p)
    frames = np.concatenate([first, changes], axis=1).cumsum(1)
    return frames.reshape(number, -1).astype(np.uint8)

  splits = dict(
    train=clips(200),
    validation=clips(20),
    test=clips(20),
  )
  rows = counts.score(splits, CLIPS)
  numbers = ("256", "289", "4,913")
  models = [f"counts, {number} contexts" for number in numbers]
  assert [row["model"] for row in rows] == models
  for row in rows:
    assert row["test"] == pytest.approx(1.5, abs=0.05)
    assert row["validation"] == pytest.approx(1.5, abs=0.05)
    assert row["copied"] == pytest.approx(0.5, abs=0.01)


def test_counts_of_clips_are_a_distribution_given_what_is_before():
  clips = clips_of(moving(32))
  train = counts.changes(clips, CLIPS)
  at = 256 * 6 + 16 * 3 + 5  # the first frame, of 256, is not scored
  others = every_level(clips[0], 256 + at, 256)
  found = counts.changes(others, CLIPS)
  for number in train.contexts:
    table = counts.count(train, number, 256)
    bits = counts.bits_of(table, found, number).reshape(256, -1)
    assert_distribution(bits, at)
    assert (bits[1:, at + 256] != bits[0, at + 256]).any()


def test_video_codecs_code_clips_without_loss():
  av = pytest.importorskip("av")
  frames = moving(16).transpose(1, 2, 0)[:32, :48]
  for name, options in baselines.VIDEO_CODECS.values():
    packets = baselines.coded(frames, name, options)
    if name == "libx264":  # FFV1's header is not in its packets
      decoder = av.CodecContext.create("h264", "r")
      decoded = []
      for packet in [*packets, None]:
        for image in decoder.decode(packet):
          decoded.append(image.to_ndarray()[:32])  # color is below
      assert (np.stack(decoded, axis=-1) == frames).all()


def test_codecs_code_a_mosaic_without_loss():
  imagecodecs = pytest.importorskip("imagecodecs")
  images = colors(7).reshape(-1, 6, 5, 3)
  mosaic = baselines.mosaic(images)
  assert mosaic.shape == (18, 15, 3)
  assert (mosaic[6:12, 5:10] == images[4]).all()
  assert not mosaic[12:, 5:].any()

  splits = {split: images for split in data_lib.SPLITS}
  rows = baselines.codecs(splits, images.shape[1:])
  codecs = baselines.CODECS.values()
  for row, (codec, options) in zip(rows, codecs, strict=True):
    encode = getattr(imagecodecs, f"{codec}_encode")
    decode = getattr(imagecodecs, f"{codec}_decode")
    content = encode(mosaic, **options)
    assert row["test"] == 8 * len(content) / images.size
    assert (decode(content) == mosaic).all(), codec
