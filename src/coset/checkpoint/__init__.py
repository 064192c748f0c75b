"""Checkpoints on disk: open one as a model with canonical tensors, and write one like it."""

from coset.checkpoint.files import Checkpoint, check_output, write
from coset.checkpoint.model import Block, Model, Saved, load, save

__all__ = ["Block", "Checkpoint", "Model", "Saved", "check_output", "load", "save", "write"]
