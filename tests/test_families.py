"""Every family computes what its transformers class computes, and its files come back bit for bit."""

import dataclasses
import filecmp
import json
import shutil

import pytest
import torch
import transformers.modeling_rope_utils as reference
from safetensors.torch import load_file, save_file

from checkpoint_zoo import CASES, LENGTH, LONG, PLAIN, VOCABULARY, ZOO, build, saved
from coset.architecture import Classifier, LanguageModel, Rotary, StreamOutput
from coset.checkpoint import load, save
from coset.checkpoint.config import Config
from coset.checkpoint.families import FAMILIES
from coset.checkpoint.rope import rotary
from coset.errors import CosetError
from coset.parameters import check
from coset.transformer import forward


def _same(folder, other):
    names = sorted(p.name for p in folder.iterdir())
    assert names == sorted(p.name for p in other.iterdir())
    assert filecmp.cmpfiles(folder, other, names, shallow=False)[0] == names


def _outputs(model, hf, family):
    """Ours and transformers' outputs on the same random inputs, in float32."""
    parameters = model.parameters(torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        if family == "vit":
            images = torch.randn(2, 3, 52, 44, generator=generator)
            patches = torch.nn.functional.unfold(images, (4, 4), stride=(4, 4)).transpose(1, 2)
            out = hf(pixel_values=images)
            ours = forward(model.architecture, parameters, patches)
        else:
            # Token 0..5 are left out: padding ids, which shift RoBERTa's positions.
            tokens = torch.randint(6, VOCABULARY, (2, LENGTH), generator=generator)
            body = hf if isinstance(model.architecture.outputs, (LanguageModel, Classifier)) else hf.base_model
            if isinstance(model.architecture.outputs, Classifier):
                body.config.pad_token_id = 0
            types = None
            extra = {}
            if family == "bert":
                types = torch.randint(0, 3, (2, LENGTH), generator=generator)
                extra["token_type_ids"] = types
            out = body(input_ids=tokens, **extra)
            ours = forward(model.architecture, parameters, tokens, types=types)
    head = not isinstance(model.architecture.outputs, StreamOutput)
    return ours, out.logits if head else out.last_hidden_state


def test_every_family_is_in_the_zoo():
    assert set(ZOO) == set(FAMILIES)


@pytest.mark.parametrize(("family", "case"), CASES)
def test_logits_equal_those_of_transformers(tmp_path, family, case):
    hf = build(family, case)
    hf.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model")
    check(model.architecture, model.parameters())
    ours, theirs = _outputs(model, hf, family)
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() / theirs.norm() < 1e-5


@pytest.mark.parametrize(("family", "case"), CASES)
def test_round_trip_is_bit_identical(tmp_path, family, case):
    path = saved(tmp_path, family, case)
    model = load(path)
    done = save(tmp_path / "out", model, lambda layer, block: block)
    assert done.rounding == 0
    _same(path, tmp_path / "out")


@pytest.mark.parametrize(("family", "case"), PLAIN)
def test_round_trip_of_bf16_shards_is_bit_identical(tmp_path, family, case):
    path = saved(tmp_path, family, case, torch.bfloat16, "40KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    save(tmp_path / "out", load(path), lambda layer, block: block)
    _same(path, tmp_path / "out")


@pytest.mark.parametrize(("family", "case"), PLAIN)
def test_every_canonical_tensor_reaches_the_files(tmp_path, family, case):
    """Negating every canonical tensor negates every stored one but the invariants: nothing is dropped, nothing is written twice."""
    path = saved(tmp_path, family, case)
    model = load(path)
    save(tmp_path / "out", model, lambda layer, block: {name: -tensor for name, tensor in block.items()})
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "out"))
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor if name in model.invariants else -tensor), name


@pytest.mark.parametrize(("family", "case"), PLAIN)
def test_canonical_and_back_from_arbitrary_canonical_tensors(tmp_path, family, case):
    path = saved(tmp_path, family, case)
    generator = torch.Generator().manual_seed(3)
    model = load(path)
    random = {name: torch.randn(t.shape, generator=generator).to(torch.float64) for name, t in model.parameters(torch.float32).items()}
    save(tmp_path / "out", model, lambda layer, block: {name: random[name] for name in block})
    again = load(tmp_path / "out").parameters()
    assert list(again) == list(random)
    assert all(torch.equal(again[name], random[name]) for name in random)


def test_body_without_its_prefix(tmp_path):
    """A language model whose file lacks the prefix of the body, as published GPT-2 files do, with mask buffers."""
    path = saved(tmp_path, "gpt2")
    tensors = load_file(path / "model.safetensors")
    plain = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 160, 160)
    bare = tmp_path / "bare"
    shutil.copytree(path, bare)
    save_file(plain, bare / "model.safetensors", {"format": "pt"})
    model = load(bare)
    assert model.invariants == ("h.0.attn.bias",)
    with_prefix, without = load(path).parameters(), model.parameters()
    assert all(torch.equal(with_prefix[name], without[name]) for name in with_prefix)


def test_mixtral_stacked_experts(tmp_path):
    hf = build("mixtral")
    hf.save_pretrained(tmp_path / "one")
    hf.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in load_file(tmp_path / "stacked" / "model.safetensors")
    one, stacked = load(tmp_path / "one").parameters(), load(tmp_path / "stacked").parameters()
    assert all(torch.equal(one[name], stacked[name]) for name in one)
    save(tmp_path / "out", load(tmp_path / "stacked"), lambda layer, block: block)
    _same(tmp_path / "stacked", tmp_path / "out")


def test_bert_with_tensorflow_names(tmp_path):
    path = saved(tmp_path, "bert")
    tensors = load_file(path / "model.safetensors")
    renamed = {n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): t for n, t in tensors.items()}
    other = tmp_path / "other"
    shutil.copytree(path, other)
    save_file(renamed, other / "model.safetensors", {"format": "pt"})
    one, two = load(path).parameters(), load(other).parameters()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_masked_language_model_pins_the_embedding(tmp_path):
    assert load(saved(tmp_path, "bert")).pinned == ("embed.tokens",)
    assert load(saved(tmp_path, "bert", "base")).pinned == ()


def _with_copy(tmp_path, family, name, source, change):
    path = saved(tmp_path, family)
    tensors = load_file(path / "model.safetensors")
    tensors[name] = tensors[source].clone() + change
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_tied_copy_in_the_file(tmp_path):
    path = _with_copy(tmp_path, "gemma", "lm_head.weight", "model.embed_tokens.weight", 0.0)
    model = load(path)
    assert model.architecture.tied
    save(tmp_path / "out", model, lambda layer, block: {name: -tensor for name, tensor in block.items()})
    after = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])


def test_tied_copy_that_differs_is_refused(tmp_path):
    path = _with_copy(tmp_path, "gemma", "lm_head.weight", "model.embed_tokens.weight", 1.0)
    with pytest.raises(CosetError, match=r"lm_head.weight differs from model.embed_tokens.weight, while the config ties them"):
        load(path).ends()


@pytest.mark.parametrize("family", ["gpt2", "gemma", "bloom"])
def test_untying_writes_what_transformers_loads(tmp_path, family):
    hf = build(family)
    hf.save_pretrained(tmp_path / "tied", max_shard_size="40KB")

    def transform(layer, block):
        return block if layer is not None else block | {"head": 2 * block["embed.tokens"].mT}

    save(tmp_path / "out", load(tmp_path / "tied"), transform, untied=True)
    again = type(hf).from_pretrained(tmp_path / "out").eval()
    assert again.config.tie_word_embeddings is False
    tokens = torch.arange(70)[None] + 6
    with torch.no_grad():
        assert torch.allclose(again(tokens).logits, 2 * hf(tokens).logits, rtol=1e-5, atol=1e-5)
    assert not load(tmp_path / "out").architecture.tied


# --- rotary frequencies -----------------------------------------------------------------------------------------------

SCALINGS = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "dynamic", "factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.3, "truncate": False},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3, "beta_fast": 20, "beta_slow": 2},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0 + j / 7 for j in range(13)], "long_factor": [1.0 + j for j in range(13)]},
]


def test_yarn_without_a_factor_is_refused_as_transformers_does():
    from transformers import LlamaConfig

    rope = {"rope_theta": 5e4, "rope_type": "yarn", "original_max_position_embeddings": 64}
    with pytest.raises(KeyError, match="factor"):
        reference.ROPE_INIT_FUNCTIONS["yarn"](LlamaConfig(hidden_size=156, num_attention_heads=6, rope_parameters=rope))
    with pytest.raises(CosetError, match=r"field rope_parameters\.factor: is missing"):
        rotary(Config("config.json", {"max_position_embeddings": 256, "rope_parameters": rope}), 26)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda s: "-".join(map(str, list(s.values())[:3])))
def test_frequencies_equal_those_of_transformers(scaling, old):
    from transformers import LlamaConfig

    theirs = LlamaConfig(hidden_size=156, num_attention_heads=6, max_position_embeddings=256, rope_parameters={"rope_theta": 5e4} | scaling)
    kind = scaling["rope_type"]
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        expected, magnitude = LlamaRotaryEmbedding.compute_default_rope_parameters(theirs)
    else:
        expected, magnitude = reference.ROPE_INIT_FUNCTIONS[kind](theirs)
    values = {"max_position_embeddings": 256}
    if old:
        values |= {"rope_theta": 5e4, "rope_scaling": {("type" if k == "rope_type" else k): v for k, v in scaling.items()}}
    else:
        values |= {"rope_parameters": {"rope_theta": 5e4} | scaling}
    ours = rotary(Config("config.json", values), 26)
    assert ours.magnitude == pytest.approx(magnitude)
    assert torch.equal(torch.tensor([f for (f,) in ours.frequencies]), expected)


def test_longrope_that_merges_planes_is_refused():
    values = {
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [100.0, 1.0]},
    }
    with pytest.raises(CosetError, match="other planes coincide"):
        rotary(Config("config.json", values), 4)


def test_pairing_and_partial_lanes(tmp_path):
    gptj = load(saved(tmp_path, "gptj")).architecture.layers[0].attention.positions
    neox = load(saved(tmp_path, "gpt_neox")).architecture.layers[0].attention.positions
    assert isinstance(gptj, Rotary)
    assert isinstance(neox, Rotary)
    assert (gptj.pairing, gptj.width) == ("interleaved", 6)
    assert (neox.pairing, neox.width) == ("half", 2)


# --- configs ----------------------------------------------------------------------------------------------------------


def _edit(path, **fields):
    config = json.loads((path / "config.json").read_text())
    config |= {k: v for k, v in fields.items() if not isinstance(v, str) or v != "absent"}
    for name in [k for k, v in fields.items() if v == "absent"]:
        config.pop(name)
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("family", "case", "fields"),
    [
        ("gpt_neox", "half", {"rope_parameters": "absent", "rotary_pct": 0.6, "rotary_emb_base": 300}),
        (
            "llama",
            "plain",
            {"rope_parameters": "absent", "rope_theta": 10000.0, "rope_scaling": None, "head_dim": 10, "is_llama_config": True},
        ),
        ("mixtral", "plain", {"rope_parameters": "absent"}),
        ("phi3", "longrope", {"rope_parameters": "absent", "rope_theta": 10000.0, "rope_scaling": {"type": "su"} | LONG}),
        ("bloom", "plain", {"hidden_size": "absent", "n_embed": 60, "num_attention_heads": 6}),
        ("gpt2", "plain", {"n_ctx": 160, "task_specific_params": {}, "tie_word_embeddings": "absent"}),
        ("bert", "plain", {"position_embedding_type": "absolute", "gradient_checkpointing": False, "tie_word_embeddings": "absent"}),
        ("gemma", "plain", {"hidden_act": "gelu", "tie_word_embeddings": "absent"}),
    ],
)
def test_configs_of_older_versions_mean_the_same(tmp_path, family, case, fields):
    path = saved(tmp_path, family, case)
    new = load(path).architecture
    assert load(_edit(path, **fields)).architecture == new


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"model_type": "t5"}, r"model_type: 't5' is not supported \(supported: bert, bloom, .*vit\)"),
        ("llama", {"model_type": "absent"}, "model_type: is missing"),
        ("llama", {"architectures": "absent"}, r"architectures: expected one class .*LlamaForCausalLM.*, got None"),
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, r"architectures: expected one class that is supported for llama"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: 50.0 changes what the model computes"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: True"),
        ("gpt2", {"activation_function": "mish"}, "activation_function: activation 'mish' is not supported"),
        ("gpt2", {"hidden_size": 61}, "hidden_size: contradicts n_embd"),
        ("gpt2", {"n_head": 7}, "7 heads do not divide the width 60"),
        ("llama", {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e4}}, "rope_type: 'mrope' is not supported"),
        ("phi3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type: 'llama3' is not supported here"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "factor: expected a positive number, got None"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "rope_theta: expected a positive number"),
        ("llama", {"num_key_value_heads": 4}, "6 heads are not a multiple of 4 KV heads"),
        ("llama", {"hidden_size": "absent"}, "hidden_size: is missing; expected a positive integer"),
        ("llama", {"hidden_size": 54.5}, "hidden_size: expected a positive integer, got 54.5"),
        ("llama", {"num_hidden_layers": True}, "num_hidden_layers: expected a positive integer, got True"),
        ("llama", {"rms_norm_eps": "1e-6"}, "rms_norm_eps: expected a number, got '1e-6'"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
        ("roberta", {"pad_token_id": None}, "pad_token_id: positions are counted from it"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("qwen2", {"layer_types": ["full_attention", "linear_attention"]}, "layer type 'linear_attention' is not supported"),
        ("gptj", {"rotary_dim": None}, "rotary_dim: null is not supported"),
    ],
)
def test_config_is_refused_by_the_name_of_its_field(tmp_path, family, fields, message):
    path = _edit(saved(tmp_path, family), **fields)
    with pytest.raises(CosetError, match=message) as caught:
        load(path)
    assert str(path / "config.json") in str(caught.value)


@pytest.mark.parametrize(
    ("family", "fields", "tensor"),
    [
        ("llama", {"num_attention_heads": 9}, "model.layers.0.self_attn.q_proj.weight"),
        ("llama", {"num_hidden_layers": 3}, "model.layers.2.self_attn.q_proj.weight is missing"),
        ("llama", {"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj.weight .* is not accounted for"),
        ("llama", {"vocab_size": 98}, r"model.embed_tokens.weight: the config gives shape \[98, 54\], the file holds \[97, 54\]"),
        ("llama", {"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias is missing"),
        ("llama", {"tie_word_embeddings": True, "architectures": ["LlamaModel"]}, "lm_head.weight .* is not accounted for"),
        ("mixtral", {"num_local_experts": 4}, "experts.4.w1.weight .* is not accounted for"),
        ("vit", {"patch_size": [2, 8]}, r"projection.weight: the config gives shape \[60, 3, 2, 8\], the file holds \[60, 3, 4, 4\]"),
        (
            "gpt2",
            {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_attention_heads": 6, "intermediate_size": 9},
            "hidden_size",
        ),
    ],
)
def test_config_that_contradicts_the_tensors(tmp_path, family, fields, tensor):
    path = _edit(saved(tmp_path, family), **fields)
    with pytest.raises(CosetError, match=tensor) as caught:
        load(path)
    assert "not those of the architecture" in str(caught.value) or "hidden_size" in tensor


# --- negative controls: the parity test would see these mistakes ----------------------------------------------------


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("llama", {"positions": "pairing"}),
        ("gptj", {"positions": "pairing"}),
        ("mistral", {"window": None}),
        ("mistral", {"window": 36}),
        ("qwen3", {"qk_norm": None}),
    ],
)
def test_a_wrong_architecture_breaks_parity(tmp_path, family, change):
    hf = build(family)
    hf.save_pretrained(tmp_path / "model")
    model = load(tmp_path / "model")
    attention = model.architecture.layers[0].attention
    if change == {"positions": "pairing"}:
        other = {"half": "interleaved", "interleaved": "half"}[attention.positions.pairing]
        change = {"positions": dataclasses.replace(attention.positions, pairing=other)}
    layer = dataclasses.replace(model.architecture.layers[0], attention=dataclasses.replace(attention, **change))
    wrong = dataclasses.replace(model.architecture, layers=(layer, *model.architecture.layers[1:]))
    ours, theirs = _outputs(dataclasses.replace(model, architecture=wrong), hf, family)
    assert (ours - theirs).norm() / theirs.norm() > 1e-4
