"""RoBERTa: BERT whose positions start behind the padding token's row."""

from coset.architecture import Architecture
from coset.checkpoint.config import Config
from coset.checkpoint.families.base import Family, Head, Outputs, linear_head, stream
from coset.checkpoint.families.encoder import LAYOUTS, POOLER, encoder

_MASKED = Head(
    stream,
    required=("lm_head.bias", *(f"lm_head.{part}.{n}" for part in ("dense", "layer_norm") for n in ("weight", "bias"))),
    optional=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    pinned=("embed.tokens",),
)


def _architecture(config: Config, outputs: Outputs) -> Architecture:
    padding = config.values.get("pad_token_id", 1)
    if not isinstance(padding, int) or isinstance(padding, bool) or padding < 0:
        raise config.fault("pad_token_id", f"positions are counted from it; expected a token, got {padding!r}")
    return encoder(config, outputs, offset=padding + 1)


FAMILY = Family(
    model_type="roberta",
    bodies=("roberta.", ""),
    heads={
        "RobertaModel": Head(stream),
        "RobertaForMaskedLM": _MASKED,
        "RobertaForCausalLM": _MASKED,
        "RobertaForSequenceClassification": Head(
            stream, required=tuple(f"classifier.{part}.{n}" for part in ("dense", "out_proj") for n in ("weight", "bias"))
        ),
        "RobertaForMultipleChoice": Head(stream, required=(*POOLER, "classifier.weight", "classifier.bias")),
        "RobertaForTokenClassification": linear_head("classifier"),
        "RobertaForQuestionAnswering": linear_head("qa_outputs"),
    },
    layouts=lambda config: LAYOUTS,
    architecture=_architecture,
)
