"""Tests of images.py: which images are in which split."""

import base64
import struct
import zlib

import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest
from helpers import small_data
from helpers.errors import refused
from helpers.small_data import source_of

from sparse_transformer import data


def test_digits_are_split_without_overlap():
  import sklearn.datasets

  source = source_of("digits")
  splits = [list(map(bytes, source.examples(k))) for k in data.SPLITS]
  sizes = [1397, 200, 200]
  assert [len(split) for split in splits] == sizes

  pixels = sklearn.datasets.load_digits().images.astype(np.uint8)
  images = [bytes(image) for image in pixels]
  # No two digits are equal, so equal sorted lists mean no overlap.
  assert sorted(sum(splits, [])) == sorted(images)
  assert len(set(images)) == 1797
  # Checkpoints record the digest.
  digest = dict(images=1397, splits=sizes, crc32="2c7e37fb")
  assert source.digest() == digest


def assert_splits(source, *expected):
  for split, pixels in zip(data.SPLITS, expected, strict=False):
    found = np.stack(list(source.examples(split)))
    np.testing.assert_array_equal(found, pixels.reshape(len(pixels), -1))


@pytest.fixture
def arrays(tmp_path, monkeypatch):
  return small_data.small_imagenet64(tmp_path, monkeypatch)


def test_imagenet64_is_read_from_arrays(tmp_path, arrays):
  train, valid = arrays
  source = source_of("imagenet64", tmp_path)
  assert_splits(source, train[:3], train[3:], valid)


def test_arrays_are_splits_by_their_names(tmp_path, arrays):
  train, valid = arrays
  path = tmp_path / "imagenet64-valid.npy"
  np.save(tmp_path / "imagenet64-train.npy", train)
  np.save(path, valid)
  source = source_of("images", tmp_path)

  assert source.shape == (64, 64, 3)
  assert_splits(source, train, valid)
  assert source.load()["test"] is source.load()["validation"]

  np.save(path, valid[:, :9])
  with refused("valid.npy.* contain images of diff"):
    source_of("images", tmp_path)


PIXELS = np.random.RandomState(0).randint(0, 256, (12, 5, 6, 3), np.uint8)
ORDER = np.random.RandomState(0).permutation(12)  # before they are cut


@pytest.mark.parametrize("pixels", [PIXELS, PIXELS[..., 0]], ids=["RGB", "L"])
def test_pictures_and_their_array_give_the_same_sequences(tmp_path, pixels):
  there = tmp_path / "there"
  array = tmp_path / "x.npy"
  small_data.write_pictures(tmp_path / "some" / "below", pixels[:7])
  small_data.write_pictures(there, pixels[7:])
  (tmp_path / "notes.txt").write_text("x")
  np.save(array, pixels)
  for path in tmp_path, array:
    source = source_of("images", path)
    assert source.shape == (5, 6, 3 if pixels.ndim == 4 else 1)
    assert_splits(source, *np.split(pixels[ORDER], [6, 9]))

  digest = source_of("images", tmp_path).digest()
  (there / "001.png").replace(there / "000.png")
  assert source_of("images", tmp_path).digest() != digest


def test_gray_picture_among_others_has_three_equal_channels(tmp_path):
  gray = PIXELS[:1, ..., 0]
  small_data.write_pictures(tmp_path, PIXELS)
  small_data.write_pictures(tmp_path, gray, ".z.png")
  source = source_of("images", tmp_path)
  found = [bytes(x) for split in data.SPLITS for x in source.examples(split)]
  assert len(found) == 13
  assert bytes(gray.repeat(3)) in found


def test_classes_in_turn_are_in_all_splits(tmp_path):
  labels = np.repeat(np.arange(10, dtype=np.uint8), 30)
  pixels = np.tile(labels[:, None, None], (1, 5, 6))
  for i, label in enumerate(labels):
    folder = tmp_path / f"{label}" / f"{i:03}"
    small_data.write_pictures(folder, pixels[i : i + 1])
  np.save(tmp_path / "x.npy", pixels)
  for path in tmp_path, tmp_path / "x.npy":
    source = source_of("images", path, fractions=(0.8, 0.1, 0.1))
    for split in data.SPLITS:
      classes = {int(x[0]) for x in source.examples(split)}
      assert len(classes) >= 9, (path, split)

  # Splits that names tell are in order.
  for name in "train", "val":
    folder = tmp_path / "named" / name
    folder.mkdir(parents=True)
    np.save(folder / "x.npy", pixels)
  source = source_of("images", tmp_path / "named")
  assert_splits(source, pixels, pixels, pixels)


def test_clips_are_cut_in_the_order_of_time(tmp_path, capfd):
  clips = PIXELS.reshape(12, 90)[:, :80].reshape(12, 20, 4, 1)
  np.save(tmp_path / "x.npy", clips)
  source = source_of("images", tmp_path / "x.npy")
  assert source.frames == 5
  assert_splits(source, clips[:6], clips[6:9], clips[9:])
  assert "clips of 5 frames are split in their order" in capfd.readouterr().err


PLANES = PIXELS[:, :, :5].transpose(0, 3, 1, 2)


@pytest.mark.parametrize(
  "array",
  [
    PLANES.reshape(12, -1),  # flat: by planes, or by pixels
    PLANES,
    PLANES.reshape(12, 3, -1),
    PLANES.transpose(2, 3, 1, 0),
    PIXELS[0],  # one picture
    PIXELS[0, ..., [0, 1, 2, 2]].transpose(1, 2, 0),
    PIXELS[..., [0, 1, 2, 2]],
    PIXELS[..., :2],
    PIXELS[None],
    PIXELS / 255,
    PIXELS.astype(np.float32),
    PIXELS.astype(int),
    PIXELS > 127,
    PIXELS[:0],
    np.uint8(7),
  ],
  ids=lambda x: f"{x.dtype} {x.shape}",
)
def test_array_that_may_be_other_images_is_refused(tmp_path, array):
  np.save(tmp_path / "x.npy", array)
  with refused("x.npy (contains|is damaged)") as error:
    source_of("images", tmp_path / "x.npy")
  if array.size:
    assert "for planes, as CIFAR-10" in str(error.value)


def test_advice_on_planes_gives_the_images(tmp_path):
  planes = PIXELS.transpose(0, 3, 1, 2).reshape(12, -1)
  np.save(tmp_path / "x.npy", planes)
  with refused("x.npy contains") as error:
    source_of("images", tmp_path / "x.npy")

  advice = str(error.value).rpartition("are published, save ")[2]
  found = eval(
    advice,
    dict(
      x=planes,
      rows=5,
      columns=6,
    ),
  )
  np.testing.assert_array_equal(found, PIXELS)


def test_array_whose_last_axis_may_count_is_told(tmp_path, capfd):
  gray = PIXELS[..., 0]
  for name, array, shape, images in (
    ("x.npy", gray.transpose(1, 2, 0), (6, 12, 1), "5 gray images of 6 x 12"),
    ("y.npy", gray, (5, 6, 1), "12 gray images of 5 x 6"),
  ):
    np.save(tmp_path / name, array)
    assert source_of("images", tmp_path / name).shape == shape
    told = f"{name}: read as {images}; if the last axis is that of images"
    assert told in capfd.readouterr().err


def test_array_in_the_order_of_columns_is_the_same(tmp_path):
  np.save(tmp_path / "x.npy", np.asfortranarray(PIXELS))
  source = source_of("images", tmp_path / "x.npy")
  assert_splits(source, *np.split(PIXELS[ORDER], [6, 9]))


def test_arrays_of_any_name_are_read_where_no_pictures_are(tmp_path):
  np.save(tmp_path / "train-images.npy", PIXELS)
  source = source_of("images", tmp_path)
  assert_splits(source, *np.split(PIXELS[ORDER], [6, 9]))
  np.save(tmp_path / "train-labels.npy", np.arange(12))
  with refused(r"labels.npy contains int64 \(12,\); images"):
    source_of("images", tmp_path)
  small_data.write_pictures(tmp_path / "below", PIXELS[:, :4])
  assert source_of("images", tmp_path).shape == (4, 6, 3)


@pytest.mark.parametrize("name", ["x.npz", "x-idx3-ubyte", "x.png", "x.mat"])
def test_file_of_another_kind_is_refused(tmp_path, name):
  np.savez(path := tmp_path / "x.npz", x=PIXELS)
  path = path.rename(tmp_path / name)
  with refused(f"{name} must be a folder of PNG or JPEG"):
    source_of("images", path)


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_photo_is_turned_as_the_camera_was_held(tmp_path, kind, orientation):
  image = np.zeros((8, 16), np.uint8)
  image[:, :8] = 255
  image[:4, :8] = 128
  exif = PIL.Image.Exif()
  exif[0x0112] = orientation
  name = "x.png" if kind == "PNG" else "x.jpg"
  photo = PIL.Image.fromarray(image)
  more = dict(save_all=True, append_images=[photo]) if kind == "MPO" else {}
  for i in range(4):
    photo.save(tmp_path / f"{i}{name}", kind, exif=exif, **more)
  source = source_of("images", tmp_path)
  # Where the tag puts the first row and the first column, by its definition.
  turned = {
    1: image,
    2: image[:, ::-1],
    3: image[::-1, ::-1],
    4: image[::-1],
    5: image.T,
    6: image.T[:, ::-1],
    7: image.T[::-1, ::-1],
    8: image.T[::-1],
  }[orientation]

  assert source.shape == (*turned.shape, 1)
  found = source.examples("train")[0].reshape(turned.shape)
  np.testing.assert_allclose(found, turned, atol=5)


def test_size_of_a_photo_is_read_without_its_pixels(tmp_path, monkeypatch):
  exif = PIL.Image.Exif()
  exif[0x0112] = 6
  for i in range(4):
    path = tmp_path / f"{i}.jpg"
    PIL.Image.new("L", (16, 8)).save(path, exif=exif)
  decoded = []
  decode = PIL.ImageFile.ImageFile.load

  def load(image):
    decoded.append(image)
    return decode(image)

  monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", load)
  source = source_of("images", tmp_path)

  assert source.shape == (16, 8, 1)
  source.digest()
  assert not decoded
  assert source.examples("train")[0].shape == (128,)
  assert decoded


# A pixel, RGB of 16 bits, which Pillow reads and does not write.
DEEP = (
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAIAAADA54+dAAAAC0lEQVR4nGNgAAMAAAcAAb"
  "KGrPQAAAAASUVORK5CYII="
)


def test_picture_that_would_lose_something_is_rejected(tmp_path):
  png = tmp_path / "0.png"

  def assert_refused(mode):
    with refused(f"0.png has the color mode {mode}"):
      source_of("images", tmp_path)

  PIL.Image.new("RGB", (4, 5)).save(png, transparency=(0, 0, 0))
  assert_refused("RGBA; conv")
  png.write_bytes(base64.b64decode(DEEP))
  assert_refused("RGB;16; conv")
  first, second = (PIL.Image.new("L", (4, 5), level) for level in (0, 9))
  first.save(png, save_all=True, append_images=[second])
  assert_refused("L, 2 times")
  for mode in "1", "P", "LA", "RGBA", "I;16":
    PIL.Image.new(mode, (4, 5)).save(png)
    assert_refused(mode)

  png.unlink()
  PIL.Image.new("CMYK", (4, 5)).save(tmp_path / "0.jpg")
  with refused("0.jpg has the color mode CMYK; conv"):
    source_of("images", tmp_path)


@pytest.mark.parametrize("bits", [2, 4])
def test_gray_of_few_bits_is_scaled_to_eight(tmp_path, bits):
  rows = np.random.RandomState(0).randint(0, 256, (4, 2)).astype(np.uint8)
  by_pixel = np.unpackbits(rows, axis=1).reshape(4, -1, bits)
  levels = by_pixel @ (1 << np.arange(bits)[::-1])
  header = struct.pack(">IIBBBBB", levels.shape[1], 4, bits, 0, 0, 0, 0)
  filtered = np.pad(rows, ((0, 0), (1, 0))).tobytes()
  chunks = {
    b"IHDR": header,
    b"IDAT": zlib.compress(filtered),
    b"IEND": b"",
  }
  content = b"\x89PNG\r\n\x1a\n"
  for name, part in chunks.items():
    size = struct.pack(">I", len(part))
    crc = struct.pack(">I", zlib.crc32(name + part))
    content += size + name + part + crc

  for i in range(4):
    (tmp_path / f"{i}.png").write_bytes(content)
  source = source_of("images", tmp_path)

  assert source.shape == (*levels.shape, 1)
  expected = levels.ravel() * 255 // (2**bits - 1)
  np.testing.assert_array_equal(source.examples("train")[0], expected)


def test_doubts_of_pillow_are_a_line_that_names_the_picture(
  tmp_path, capfd, monkeypatch
):
  small_data.write_pictures(tmp_path, PIXELS)
  monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 20)
  list(source_of("images", tmp_path).examples("train"))
  lines = capfd.readouterr().err.splitlines()
  assert len(lines) == 12
  assert f"{tmp_path}/000.png: Image size (30 pixels) exceeds" in lines[0]


def test_unsound_picture_is_an_error_that_names_it(tmp_path):
  small_data.write_pictures(tmp_path, PIXELS)
  source = source_of("images", tmp_path)
  path = tmp_path / f"{ORDER[8]:03}.png"
  content = path.read_bytes()
  PIL.Image.fromarray(PIXELS[0, :4]).save(path)
  message = r"has .*\(4, 6, 3\), but .*000.png has \(5, 6, 3\); all"
  with refused(f"{path} {message}"):
    source.examples("test")
  path.write_bytes(content[:-30])
  with refused(f"{path} is damaged"):
    list(source.examples("validation"))

  mixed = tmp_path / "mixed"
  small_data.write_pictures(mixed, [*PIXELS[:3, ..., 0], *PIXELS[:3]])
  with refused(r"00.\.png has .*\(5, 6, 3\), .*\(5, 6, 1\)"):
    source_of("images", mixed).examples("train")


def test_array_that_is_missing_or_claims_too_much_is_named(tmp_path, arrays):
  path = tmp_path / "valid_64x64.npy"
  source = source_of("imagenet64", tmp_path)
  header = dict(
    descr="|u1",
    fortran_order=False,
    shape=(2**40, 64, 64, 3),
  )
  with path.open("wb") as file:
    np.lib.format.write_array_header_1_0(file, header)
  with refused(f"{path} is damaged"):
    source.examples("test")
  path.unlink()
  with pytest.raises(FileNotFoundError, match=f"{path}"):
    source.examples("test")


@pytest.mark.parametrize(
  "change",
  [
    lambda x: x[:, :32, :32],
    lambda x: x.reshape(len(x), -1),
    lambda x: x.transpose(0, 3, 1, 2),
    lambda x: x[..., :1],
    lambda x: x / 255,
  ],
)
def test_imagenet64_of_other_than_its_images_is_refused(
  tmp_path, arrays, change
):
  np.save(tmp_path / "valid_64x64.npy", change(arrays[1]))
  with refused("valid_64x64.npy contain"):
    source_of("imagenet64", tmp_path).examples("train")


def test_imagenet64_needs_more_than_the_images_held_out(tmp_path, arrays):
  np.save(tmp_path / "train_64x64.npy", arrays[0][:2])
  with refused("the train split is empty"):
    source_of("imagenet64", tmp_path).examples("train")


def test_digest_covers_every_byte_of_the_files(tmp_path, arrays):
  digests = [source_of("imagenet64", tmp_path).digest()]
  for name in ("train_64x64.npy", "valid_64x64.npy"):
    path = tmp_path / name
    content = bytearray(path.read_bytes())
    content[-7000] ^= 1
    path.write_bytes(content)
    digests.append(source_of("imagenet64", tmp_path).digest())

  assert {digest["images"] for digest in digests} == {3}
  assert len({digest["crc32"] for digest in digests}) == 3
