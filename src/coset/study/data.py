"""Real images that need no download: the 8x8 handwritten digits that come with scikit-learn."""

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


def patchify(images: Tensor, size: int) -> Tensor:
    """Cut images [n, height, width] into square patches [n, patches, size * size], row by row.

    Raises
    ------
    CosetError
        If `size` does not divide height and width.
    """
    if images.dim() != 3 or images.shape[1] % size or images.shape[2] % size:
        raise CosetError(f"patches: expected images [n, height, width] with sides divisible by {size}, got {list(images.shape)}")
    count, height, width = images.shape
    blocks = images.reshape(count, height // size, size, width // size, size)
    return blocks.permute(0, 1, 3, 2, 4).reshape(count, -1, size * size)


def digits(*, test: int = 360, seed: int = 0) -> Dataset:
    """The 1,797 digits (8x8 pixels, 10 classes) as 4x4 patches of 2x2 pixels, float32.

    One split for all models: `test` images, drawn by `seed`, are held out. Pixels are shifted and scaled so that the
    training part has mean 0 and standard deviation 1.

    Raises
    ------
    CosetError
        If scikit-learn is missing, or if `test` leaves one of the two parts empty.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise CosetError("digits: the images come with scikit-learn, which is not installed; try: pip install 'coset[demo]'") from error
    bunch = load_digits()
    images, classes = torch.from_numpy(bunch.images).to(torch.float64), torch.from_numpy(bunch.target).to(torch.int64)
    if not 0 < test < len(images):
        raise CosetError(f"digits: the test part must hold between 1 and {len(images) - 1} images, got {test}")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held, kept = order[:test], order[test:]
    standard = (images - images[kept].mean()) / images[kept].std()
    inputs = patchify(standard, 2).to(torch.float32)
    return Dataset(inputs[kept], classes[kept], inputs[held], classes[held])
