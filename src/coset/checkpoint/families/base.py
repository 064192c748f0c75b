"""What a family's file declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coset.architecture import Architecture, Classifier, LanguageModel, StreamOutput
from coset.checkpoint.config import Config
from coset.checkpoint.layout import Entry, mirror, one

Outputs = LanguageModel | Classifier | StreamOutput


@dataclass(frozen=True)
class Head:
    """What a class of ``architectures`` puts behind the stream.

    Attributes
    ----------
    outputs
        The architecture's output, from the config.
    entries
        Stored tensors of the head that carry canonical ones.
    required, optional
        Known invariants: stored tensors that no symmetry moves, copied as they are. A head that an architecture cannot express (a pooler,
        a masked-language-model transform) is invariant as a whole; the stream it reads is then the output, so that its basis is pinned.
    pinned
        Canonical tensors that an invariant head also reads, so that no symmetry may change them.
    """

    outputs: Callable[[Config], Outputs]
    entries: tuple[Entry, ...] = ()
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One way in which files of a family store the body; files that hold `anchor` use it.

    `optional` are invariants that files may hold (masks, frequencies, poolers): names with the placeholders of :class:`Entry`.
    """

    anchor: str
    entries: tuple[Entry, ...]
    optional: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A ``model_type``: its heads by class name, its layouts, and the reading of its config.

    `bodies` are the prefixes of the body's tensors: inside a head class, and saved alone.
    """

    model_type: str
    bodies: tuple[str, ...]
    heads: Mapping[str, Head]
    layouts: Callable[[Config], tuple[Layout, ...]]
    architecture: Callable[[Config, Outputs], Architecture]


def stream(config: Config) -> StreamOutput:
    """No head, or one that is invariant as a whole."""
    return StreamOutput()


def language_model(tied: bool, bias: bool = False) -> Callable[[Config], LanguageModel]:
    """A language model's head; `tied` is the class's default of ``tie_word_embeddings``."""
    return lambda config: LanguageModel(config.flag("tie_word_embeddings", tied), bias)


def last_token(config: Config) -> Outputs:
    """A classifier on the last token; with a single label it is a regression, whose one weight row is an invariant."""
    classes = config.labels()
    return Classifier(classes, "last", bias=False) if classes > 1 else StreamOutput()


LM_HEAD = (
    one("lm_head.weight", "head", "vocabulary stream"),
    mirror("lm_head.weight", "embed.tokens", "vocabulary stream"),
    one("lm_head.bias", "head_bias", "vocabulary"),
)
"""A language model's head; with tied embeddings its weight may be stored again."""

SCORE = Head(last_token, (one("score.weight", "head", "class stream"),), optional=("score.weight",))
"""transformers' sequence classification on decoders."""


def decoder_heads(stem: str, tied: bool, head: tuple[Entry, ...] = LM_HEAD, lm: str = "ForCausalLM", bias: bool = False) -> dict[str, Head]:
    """The heads that decoders share: language model, sequence classification, none."""
    return {
        f"{stem}{lm}": Head(language_model(tied, bias), head),
        f"{stem}ForSequenceClassification": SCORE,
        f"{stem}Model": Head(stream),
    }


def linear_head(name: str) -> Head:
    """An invariant ``nn.Linear`` on the stream."""
    return Head(stream, required=(f"{name}.weight", f"{name}.bias"))
