"""Tests of images.py: which images are in which split."""

import base64

import numpy as np
import PIL.Image
import pytest
import small_data
from small_data import config

from sparse_transformer import data


def test_digits_are_split_without_overlap():
  import sklearn.datasets

  source = data.source(config("digits"))
  splits = [list(map(bytes, source.examples(k))) for k in data.SPLITS]
  assert [len(split) for split in splits] == [1397, 200, 200]
  images = sklearn.datasets.load_digits().images.astype(np.uint8)
  # No two digits are equal, so equal sorted lists mean no overlap.
  assert sorted(sum(splits, [])) == sorted(map(bytes, images))
  assert len(set(map(bytes, images))) == 1797
  # Checkpoints record the digest.
  assert source.digest() == dict(
    images=1397, splits=[1397, 200, 200], crc32="2c7e37fb"
  )


def assert_splits(source, *expected):
  for split, pixels in zip(data.SPLITS, expected, strict=False):
    found = np.stack(list(source.examples(split)))
    np.testing.assert_array_equal(found, pixels.reshape(len(pixels), -1))


@pytest.fixture
def arrays(tmp_path, monkeypatch):
  return small_data.small_imagenet64(tmp_path, monkeypatch)


def test_imagenet64_is_read_from_arrays(tmp_path, arrays):
  train, valid = arrays
  source = data.source(config("imagenet64", tmp_path))
  assert_splits(source, train[:3], train[3:], valid)


def test_arrays_are_splits_by_their_names(tmp_path, arrays):
  train, valid = arrays
  np.save(tmp_path / "imagenet64-train.npy", train.reshape(len(train), -1))
  np.save(tmp_path / "imagenet64-valid.npy", valid)
  source = data.source(config("images", tmp_path))
  assert source.shape == (64, 64, 3)
  assert_splits(source, train, valid)
  assert source.load()["test"] is source.load()["validation"]
  np.save(tmp_path / "imagenet64-valid.npy", valid[:, :9])
  with pytest.raises(ValueError, match="valid.npy.* have images of diff"):
    data.source(config("images", tmp_path))


PIXELS = np.random.RandomState(0).randint(0, 256, (12, 5, 4, 3), np.uint8)


@pytest.mark.parametrize("pixels", [PIXELS, PIXELS[..., 0]], ids=["RGB", "L"])
def test_pictures_and_their_array_give_the_same_sequences(tmp_path, pixels):
  small_data.write_pictures(tmp_path / "some" / "below", pixels[:7])
  small_data.write_pictures(tmp_path / "there", pixels[7:])
  (tmp_path / "notes.txt").write_text("x")
  np.save(tmp_path / "x.npy", pixels)
  found = [
    data.source(config("images", p)) for p in (tmp_path, tmp_path / "x.npy")
  ]
  for source in found:
    assert source.shape == (5, 4, 3 if pixels.ndim == 4 else 1)
    assert_splits(source, *np.split(pixels, [6, 9]))
  digest, there = found[0].digest(), tmp_path / "there"
  (there / "001.png").replace(there / "000.png")
  assert data.source(config("images", tmp_path)).digest() != digest


def test_gray_picture_among_others_has_three_equal_channels(tmp_path):
  small_data.write_pictures(tmp_path, PIXELS)
  small_data.write_pictures(tmp_path, PIXELS[:1, ..., 0], ".z.png")
  source = data.source(config("images", tmp_path))
  gray = source.examples("train")[1]  # 000.png, 000.z.png
  np.testing.assert_array_equal(gray, PIXELS[0, ..., 0].repeat(3))


@pytest.mark.parametrize("kind", ["JPEG", "MPO"])
def test_photo_is_turned_as_the_camera_was_held(tmp_path, kind):
  gray = np.zeros((8, 16), np.uint8)
  gray[:, :8] = 255
  exif = PIL.Image.Exif()
  exif[0x0112] = 6  # to be turned by 90 degrees, clockwise
  for i in range(4):
    photo = PIL.Image.fromarray(gray)
    more = dict(save_all=True, append_images=[photo]) if kind == "MPO" else {}
    photo.save(tmp_path / f"{i}.jpg", kind, exif=exif, **more)
  source = data.source(config("images", tmp_path))
  assert source.shape == (16, 8, 1)
  image = source.examples("train")[0].reshape(16, 8)
  assert image[:8].min() > 250 and image[8:].max() < 5


# A pixel, RGB of 16 bits, which Pillow reads and does not write.
DEEP = (
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAAC0lEQVR4nGNgAAMAAAcAAb"
  "KGrPQAAAAASUVORK5CYII="
)


def test_picture_that_would_lose_something_is_rejected(tmp_path):
  PIL.Image.new("RGB", (4, 5)).save(tmp_path / "0.png", transparency=(0, 0, 0))
  with pytest.raises(ValueError, match="0.png has the color mode RGBA; conv"):
    data.source(config("images", tmp_path))
  (tmp_path / "0.png").write_bytes(base64.b64decode(DEEP))
  with pytest.raises(ValueError, match="0.png has the color mode RGB;16; conv"):
    data.source(config("images", tmp_path))


def test_unsound_picture_is_an_error_that_names_it(tmp_path):
  small_data.write_pictures(tmp_path, PIXELS)
  source, path = data.source(config("images", tmp_path)), tmp_path / "008.png"
  content = path.read_bytes()
  PIL.Image.fromarray(PIXELS[0, :4]).save(path)
  message = r"has .*\(4, 4, 3\), but .*000.png has \(5, 4, 3\); all"
  with pytest.raises(ValueError, match=f"{path} {message}"):
    source.examples("test")
  path.write_bytes(content[:-30])
  with pytest.raises(ValueError, match=f"{path} is damaged"):
    list(source.examples("validation"))
  gray = tmp_path / "gray"
  small_data.write_pictures(gray, [*PIXELS[:3, ..., 0], *PIXELS[:3]])
  with pytest.raises(
    ValueError, match=r"003.png has .*\(5, 4, 3\), .*\(5, 4, 1\)"
  ):
    data.source(config("images", gray)).examples("train")


def test_array_that_is_missing_or_claims_too_much_is_named(tmp_path, arrays):
  path = tmp_path / "valid_64x64.npy"
  with path.open("wb") as file:
    header = dict(descr="|u1", fortran_order=False, shape=(2**40, 64, 64, 3))
    np.lib.format.write_array_header_1_0(file, header)
  with pytest.raises(ValueError, match=f"{path} is damaged"):
    data.source(config("imagenet64", tmp_path)).examples("test")
  path.unlink()
  with pytest.raises(FileNotFoundError, match=f"{path}"):
    data.source(config("imagenet64", tmp_path)).examples("test")


def test_digest_covers_every_byte_of_the_files(tmp_path, arrays):
  digests = [data.source(config("imagenet64", tmp_path)).digest()]
  for name in ("train_64x64.npy", "valid_64x64.npy"):
    content = bytearray((tmp_path / name).read_bytes())
    content[-7000] ^= 1
    (tmp_path / name).write_bytes(content)
    digests.append(data.source(config("imagenet64", tmp_path)).digest())
  assert {digest["images"] for digest in digests} == {3}
  assert len({digest["crc32"] for digest in digests}) == 3
