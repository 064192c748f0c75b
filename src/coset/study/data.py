"""Data in the form that training wants, and the images that need no download: the 8x8 handwritten digits that come with scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coset.errors import CosetError

DIGITS_GRID = (4, 4)
"""Patches of a digit along the height and the width."""
DIGITS_FEATURES = 4
"""Pixels of a patch (2x2)."""
DIGITS_CLASSES = 10


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets, split once into a part to train on and a part to test on.

    Inputs are patches [n, patches, features] or token ids [n, length]; targets are classes [n], or None for next tokens.
    """

    train_inputs: Tensor
    train_targets: Tensor | None
    test_inputs: Tensor
    test_targets: Tensor | None

    def to(self, device: str) -> Dataset:
        """The same data on `device`."""
        parts = (self.train_inputs, self.train_targets, self.test_inputs, self.test_targets)
        return Dataset(*(None if x is None else x.to(device) for x in parts))  # type: ignore[arg-type]


def patchify(images: Tensor, size: int) -> Tensor:
    """Cut images [n, height, width] into square patches [n, patches, size * size], row by row.

    Colour images [n, height, width, channels] give patches [n, patches, size * size * channels], the channels of a pixel together.

    Raises
    ------
    CosetError
        If `size` does not divide height and width.
    """
    if images.dim() not in (3, 4) or images.shape[1] % size or images.shape[2] % size:
        raise CosetError(f"patches: expected images [n, height, width] with sides divisible by {size}, got {list(images.shape)}")
    count, height, width = images.shape[:3]
    blocks = images.reshape(count, height // size, size, width // size, size, -1)
    return blocks.permute(0, 1, 3, 2, 4, 5).reshape(count, (height // size) * (width // size), -1)


def digit_images() -> tuple[Tensor, Tensor]:
    """The 1,797 digits [n, 8, 8], float64 in 0..16, and their classes [n].

    Raises
    ------
    CosetError
        If scikit-learn is missing.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise CosetError("digits: the images come with scikit-learn, which is not installed; try: pip install 'coset[demo]'") from error
    bunch = load_digits()
    return torch.from_numpy(bunch.images).to(torch.float64), torch.from_numpy(bunch.target).to(torch.int64)


def digits(*, test: int = 360, seed: int = 0) -> Dataset:
    """The 1,797 digits (8x8 pixels, 10 classes) as 4x4 patches of 2x2 pixels, float32.

    One split for all models: `test` images, drawn by `seed`, are held out. Pixels are shifted and scaled so that the
    training part has mean 0 and standard deviation 1.

    Raises
    ------
    CosetError
        If scikit-learn is missing, or if `test` leaves one of the two parts empty.
    """
    images, classes = digit_images()
    if not 0 < test < len(images):
        raise CosetError(f"digits: the test part must hold between 1 and {len(images) - 1} images, got {test}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held, kept = order[:test], order[test:]
    standard = (images - images[kept].mean()) / images[kept].std()
    inputs = patchify(standard, 2).to(torch.float32)
    return Dataset(inputs[kept], classes[kept], inputs[held], classes[held])
