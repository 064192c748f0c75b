"""BERT: post-norm encoder with token types. Its heads transform the stream before they read it, so they are invariants."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Head, Outputs, linear_head, stream
from coset.checkpoint.families.encoder import LAYOUTS, POOLER, encoder

_PREDICTIONS = tuple(f"cls.predictions.{n}" for n in ("bias", "transform.dense.weight", "transform.dense.bias"))
_NORMS = tuple(f"cls.predictions.transform.LayerNorm.{n}" for n in ("weight", "bias", "gamma", "beta"))
_DECODER = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")
_NEXT = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")
_MASKED = Head(stream, required=_PREDICTIONS, optional=(*_NORMS, *_DECODER, *_NEXT), pinned=("embed.tokens",))
_POOLED = Head(stream, required=(*POOLER, "classifier.weight", "classifier.bias"))


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    return encoder(config, outputs, offset=0)


FAMILY = Family(
    model_type="bert",
    bodies=("bert.", ""),
    heads={
        "BertModel": Head(stream),
        "BertForMaskedLM": _MASKED,
        "BertLMHeadModel": _MASKED,
        "BertForPreTraining": Head(
            stream, required=(*_PREDICTIONS, *_NEXT, *POOLER), optional=(*_NORMS, *_DECODER), pinned=("embed.tokens",)
        ),
        "BertForNextSentencePrediction": Head(stream, required=(*_NEXT, *POOLER)),
        "BertForSequenceClassification": _POOLED,
        "BertForMultipleChoice": _POOLED,
        "BertForTokenClassification": linear_head("classifier"),
        "BertForQuestionAnswering": linear_head("qa_outputs"),
    },
    layouts=lambda config: LAYOUTS,
    architecture=_architecture,
)
