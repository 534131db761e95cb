"""Tests of images.py: which images are in which split."""

import io

import numpy as np
import pytest
import small_data
from small_data import SHARED, config

from sparse_transformer import data

CIFAR10 = SHARED / "tensorflow_datasets"


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
  assert source.digest() == {"images": 1397, "crc32": "2c7e37fb"}


@pytest.fixture
def arrays(tmp_path, monkeypatch):
  return small_data.small_imagenet64(tmp_path, monkeypatch)


def test_imagenet64_is_read_from_arrays(tmp_path, arrays):
  train, valid = arrays
  source = data.source(config("imagenet64", tmp_path))
  for split, expected in (
    ("train", train[:3]),
    ("validation", train[3:]),
    ("test", valid),
  ):
    found = np.stack(list(source.examples(split)))
    np.testing.assert_array_equal(found, expected.reshape(len(expected), -1))


def claim(path, shape):
  """Writes an array whose header claims another shape."""
  with path.open("wb") as file:
    header = dict(descr="|u1", fortran_order=False, shape=shape)
    np.lib.format.write_array_header_1_0(file, header)
    file.write(bytes(64 * 64 * 3))


@pytest.mark.parametrize(
  "spoil, message",
  [
    (lambda path: path.unlink(), "no file"),
    (lambda path: claim(path, (2**40, 64, 64, 3)), "damaged"),
    (lambda path: claim(path, (-1, 64, 64, 3)), "damaged"),
  ],
  ids=["missing", "huge", "negative"],
)
def test_array_without_images_is_an_error_that_names_it(
  tmp_path, arrays, spoil, message
):
  spoil(tmp_path / "valid_64x64.npy")
  source = data.source(config("imagenet64", tmp_path))
  with pytest.raises((ValueError, OSError), match=message) as error:
    source.examples("test")
  assert "valid_64x64.npy" in str(error.value)


def test_image_of_another_size_is_an_error_that_names_it():
  splits = dict.fromkeys(data.SPLITS, np.zeros((3, 5, 4, 3), np.uint8))
  others = {
    "validation": data.Lazy(3, lambda i: np.zeros((3, 4, 3), np.uint8)),
    "test": data.Lazy(3, lambda i: np.zeros((5, 4, 3))),
  }
  source = data.Images((5, 4, 3), 256, lambda: splits | others)
  assert len(source.examples("train")[1]) == 60
  for split, words in (("validation", "uint8 .3, 4"), ("test", "float64 .5")):
    with pytest.raises(ValueError, match=f"image 1 of {split} is {words}"):
      source.examples(split)[1]


def test_digest_covers_every_byte_of_the_files(tmp_path, arrays):
  digests = [data.source(config("imagenet64", tmp_path)).digest()]
  for name in ("train_64x64.npy", "valid_64x64.npy"):
    content = bytearray((tmp_path / name).read_bytes())
    content[-7000] ^= 1
    (tmp_path / name).write_bytes(content)
    digests.append(data.source(config("imagenet64", tmp_path)).digest())
  assert {digest["images"] for digest in digests} == {3}
  assert len({digest["crc32"] for digest in digests}) == 3


@pytest.mark.skipif(
  not (CIFAR10 / "cifar10").is_dir(), reason="needs a prepared CIFAR-10"
)
def test_stock_cifar10_is_read():
  import PIL.Image
  import tensorflow_datasets as tfds

  source = data.source(config("cifar10", CIFAR10))
  sizes = [len(source.examples(split)) for split in data.SPLITS]
  assert sizes == [48_000, 2_000, 10_000]
  examples = source.examples("train")
  pixels = np.stack([examples[i] for i in range(0, 48_000, 160)])
  # Published channel means of the training set: 0.491, 0.482, 0.447.
  means = pixels.reshape(-1, 3).mean(0) / 255
  np.testing.assert_allclose(means, [0.491, 0.482, 0.447], atol=0.03)
  # The held-out images are always the same, and not trained on.
  again = data.source(config("cifar10", CIFAR10))
  held_out = [
    [bytes(made.examples("validation")[i]) for i in range(0, 2_000, 20)]
    for made in (source, again)
  ]
  assert held_out[0] == held_out[1]
  assert not {*held_out[0]} & {*map(bytes, pixels)}

  builder = tfds.builder(
    "cifar10", data_dir=CIFAR10, file_format="array_record"
  )
  skip = {"image": tfds.decode.SkipDecoding()}
  png = builder.as_data_source("test", decoders=skip)[0]["image"]
  image = np.asarray(PIL.Image.open(io.BytesIO(png)))
  np.testing.assert_array_equal(source.examples("test")[0], image.ravel())
