"""Scramble, apply, align and merge on checkpoints of every family, judged by what transformers computes from the written files."""

import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoint_zoo import CASES, PLAIN, ROPE, VOCABULARY, ZOO, build, saved
from coset.checkpoint import load
from coset.checkpoint.inspection import facts
from coset.checkpoint.operations import align, apply, merge, scramble
from coset.errors import CosetError
from coset.transform import SPACES, Transform

VARIANTS = [
    ("llama", "tied"),
    ("gpt2", "untied"),
    ("gpt2", "base"),
    ("gpt_neox", "half"),
    ("qwen3", "biases"),
    ("bert", "base"),
    ("vit", "base"),
]


def _loaded(folder, dtype=torch.float32):
    """The folder through transformers, which must find every tensor that it wants and no other."""
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, report = kind.from_pretrained(folder, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model.config._experts_implementation = "eager"
    return model.eval()


def _outputs(folder, dtype=torch.float32):
    model = _loaded(folder, dtype)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        if model.config.model_type == "vit":
            out = model(pixel_values=torch.randn(2, 3, 52, 44, generator=generator).to(dtype))
        else:
            model.config.pad_token_id = 0
            out = model(input_ids=torch.randint(6, VOCABULARY, (2, 90), generator=generator))
    return (
        out.logits if hasattr(out, "logits") else out.prediction_logits if hasattr(out, "prediction_logits") else out.last_hidden_state
    ).double()


def _gap(a, b):
    return float((a - b).norm() / b.norm())


def _changes(before, after):
    """Relative change of every stored tensor of two folders in float64, which must have the same names, shapes and dtypes."""
    pairs = [_stored(folder) for folder in (before, after)]
    assert pairs[0].keys() == pairs[1].keys()
    out = {}
    for name, x in pairs[0].items():
        y = pairs[1][name]
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        out[name] = _gap(y.double(), x.double()) if x.is_floating_point() and x.norm() > 0 else float(not torch.equal(x, y))
    return out


def _stored(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


# What a checkpoint without a head of its own, or with one that the architecture cannot express, keeps: its stream is its output.
PINNED = {
    ("gpt2", "base"): ("ln_f.",),
    ("gpt2", "tokens"): ("ln_f.", "classifier."),
    ("gptj", "base"): ("ln_f.",),
    ("llama", "base"): ("embed_tokens.", "norm."),
    ("llama", "regression"): ("embed_tokens.", "norm.", "score."),
    ("bloom", "base"): ("ln_f.", "word_embeddings_layernorm."),
    ("vit", "base"): ("layernorm.", "pooler."),
}
POST_NORM = ("LayerNorm", "output.dense.bias")


def _pinned(family, case, name):
    if family in ("bert", "roberta"):
        kept = not (name.endswith("attention.output.dense.bias")) and any(part in name for part in POST_NORM)
        masked = case in ("plain", "pretraining", "causal") and "embeddings" in name
        return kept or masked or name.startswith(("cls.", "classifier.", "lm_head.")) or "pooler" in name
    return name.removeprefix("transformer.").removeprefix("model.").startswith(PINNED.get((family, case), ()))


@pytest.mark.parametrize(("family", "case"), CASES)
def test_scrambled_copies_compute_the_same_and_move_every_tensor_that_may(tmp_path, family, case):
    path = saved(tmp_path, family, case)
    reference = _outputs(path)
    outs = [tmp_path / "one", tmp_path / "two"]
    for seed, out in enumerate(outs):
        written = scramble(path, out, seed=seed)
        assert written.rounding < 1e-7
        assert _gap(_outputs(out), reference) < 1e-4
    for a, b in ((path, outs[0]), (path, outs[1]), (outs[0], outs[1])):
        changes = _changes(a, b)
        assert {n for n, c in changes.items() if c == 0} == {n for n in changes if _pinned(family, case, n)}
        assert all(c > 1e-3 for c in changes.values() if c)


ATTENTION = {"q", "k", "v", "o", "q_bias", "k_bias", "v_bias"}
MLP = {"up", "gate", "down", "up_bias", "gate_bias"}
MOVES = {
    "heads": ATTENTION | {"q_gain", "k_gain"},
    "qk": {"q", "k", "q_bias", "k_bias"},
    "vo": {"v", "o", "v_bias"},
    "neurons": MLP,
    "experts": MLP | {"router"},
    "gains": {"gain", "bias", "q", "k", "v", "up", "gate", "router", "head", "q_gain", "k_gain"},
    # Biases, means of what writes to the stream and of what reads it, and tables that share a constant.
    "shifts": ATTENTION
    | MLP
    | {
        "o_bias",
        "down_bias",
        "bias",
        "head",
        "head_bias",
        "router",
        "tokens",
        "positions",
        "types",
        "patches",
        "patches_bias",
        "class_token",
    },
    "stream": {
        "gain",
        "bias",
        "q",
        "k",
        "v",
        "o",
        "o_bias",
        "up",
        "gate",
        "down",
        "down_bias",
        "router",
        "head",
        "tokens",
        "positions",
        "types",
        "patches",
        "patches_bias",
        "class_token",
    },
}
WITHOUT = {
    "heads": {"bloom"},
    "experts": set(ZOO) - {"mixtral"},
    "gains": {"bert", "roberta"},
    "shifts": {"llama", "mistral", "qwen2", "qwen3", "gemma", "phi3", "olmo2"},
    "stream": {"bert", "roberta"},
}


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize(("family", "case"), PLAIN)
def test_each_space_alone_moves_its_tensors_only(tmp_path, family, case, space):
    path, out = saved(tmp_path, family, case), tmp_path / "out"
    if family in WITHOUT.get(space, ()):
        with pytest.raises(CosetError, match=f"nothing can move in {space}"):
            scramble(path, out, spaces=(space,))
        assert not out.exists()
        return
    scramble(path, out, spaces=(space,), seed=2)
    before, after = load(path).parameters(), load(out).parameters()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert {name.rsplit(".", 1)[-1] for name in moved} <= MOVES[space]
    assert _gap(_outputs(out), _outputs(path)) < 1e-4


@pytest.mark.parametrize(("family", "case"), PLAIN + VARIANTS)
def test_align_returns_the_original(tmp_path, family, case):
    path, other, out = saved(tmp_path, family, case), tmp_path / "scrambled", tmp_path / "aligned"
    scramble(path, other, seed=4)
    written = align(path, other, out)
    assert max(_changes(path, out).values()) < 1e-5
    assert _gap(_outputs(out), _outputs(path)) < 1e-5
    assert [d.layer for d in written.distances] == [None, 0, 1]
    assert all(d.after < 1e-5 for d in written.distances)
    assert all(d.before > 0.1 for d in written.distances[1:])


@pytest.mark.parametrize(("family", "case"), [("llama", "plain"), ("gpt2", "plain"), ("mixtral", "plain"), ("bert", "plain")])
def test_apply_repeats_and_undoes(tmp_path, family, case):
    path, other, element = saved(tmp_path, family, case), tmp_path / "other", tmp_path / "g.safetensors"
    scramble(path, other, seed=6, transform=element)
    apply(element, path, tmp_path / "again")
    for file in other.glob("*.safetensors"):
        one, two = (load_file(folder / file.name) for folder in (other, tmp_path / "again"))
        assert all(torch.equal(one[name], two[name]) for name in one)
    apply(element, other, tmp_path / "back", inverse=True)
    assert max(_changes(path, tmp_path / "back").values()) < 1e-5
    align(path, other, tmp_path / "aligned", transform=tmp_path / "h.safetensors")
    apply(tmp_path / "h.safetensors", other, tmp_path / "aligned again")
    assert max(_changes(tmp_path / "aligned", tmp_path / "aligned again").values()) == 0


@pytest.mark.parametrize(("family", "case"), PLAIN)
def test_merging_a_scrambled_copy_changes_nothing_and_without_alignment_it_does(tmp_path, family, case):
    path, other = saved(tmp_path, family, case), tmp_path / "other"
    scramble(path, other, seed=8)
    merge(path, [other], tmp_path / "aligned")
    reference = _outputs(path)
    assert _gap(_outputs(tmp_path / "aligned"), reference) < 1e-4
    merge(path, [other], tmp_path / "naive", aligned=False)
    assert _gap(_outputs(tmp_path / "naive"), reference) > 0.05


def test_merge_is_the_weighted_mean(tmp_path):
    folders = [saved(tmp_path / str(seed), "gpt2", "classes", seed=seed) for seed in range(3)]
    stored = [_stored(folder) for folder in folders]

    def check(out, share):
        for name, tensor in _stored(out).items():
            expected = sum(s * x[name].double() for s, x in zip(share, stored, strict=False))
            assert torch.allclose(tensor.double(), expected, atol=1e-7), name

    merge(folders[0], folders[1:], tmp_path / "equal", aligned=False)
    check(tmp_path / "equal", (1 / 3, 1 / 3, 1 / 3))
    merge(folders[0], folders[1:], tmp_path / "most", weight=0.8, aligned=False)
    check(tmp_path / "most", (0.2, 0.4, 0.4))
    merge(folders[0], folders[1:2], tmp_path / "none", weight=0.0)
    assert max(_changes(folders[0], tmp_path / "none").values()) < 1e-7
    for weight in (-0.1, 1.1, float("nan")):
        with pytest.raises(CosetError, match="weight"):
            merge(folders[0], folders[1:], tmp_path / "bad", weight=weight)
    assert not (tmp_path / "bad").exists()


def test_merge_averages_invariants_of_different_models(tmp_path):
    """The pooler and the classifier of BERT take part in the mean; scramble and align copy them."""
    one, two = (saved(tmp_path / str(seed), "bert", "classes", seed=seed) for seed in (0, 1))
    merge(one, [two], tmp_path / "merged")
    a, b, mean = (_stored(folder) for folder in (one, two, tmp_path / "merged"))
    for name in load(one).invariants:
        assert torch.allclose(mean[name], (a[name] + b[name]) / 2)
    align(one, two, tmp_path / "aligned")
    aligned = _stored(tmp_path / "aligned")
    assert load(one).invariants
    assert all(torch.equal(aligned[name], b[name]) for name in load(one).invariants)
    _outputs(tmp_path / "merged")


def test_merge_of_three_scrambled_copies(tmp_path):
    path = saved(tmp_path, "qwen2")
    for seed in (1, 2):
        scramble(path, tmp_path / f"copy{seed}", seed=seed)
    merge(path, [tmp_path / "copy1", tmp_path / "copy2"], tmp_path / "merged")
    assert max(_changes(path, tmp_path / "merged").values()) < 1e-5


def test_align_brings_independent_models_closer_and_keeps_their_function(tmp_path):
    one, two = (saved(tmp_path / str(seed), "llama", seed=seed) for seed in (0, 1))
    written = align(one, two, tmp_path / "out")
    assert all(d.after < d.before for d in written.distances)
    assert _gap(_outputs(tmp_path / "out"), _outputs(two)) < 1e-4
    assert _gap(_outputs(tmp_path / "out"), _outputs(one)) > 0.1


def test_heads_stand_for_the_two_stage_algorithm_in_align(tmp_path):
    path = saved(tmp_path, "llama")
    scramble(path, tmp_path / "other", spaces=("heads", "qk", "vo"))
    align(path, tmp_path / "other", tmp_path / "out", spaces=("heads",))
    assert max(_changes(path, tmp_path / "out").values()) < 1e-5


def test_a_scramble_never_leaves_in_place_what_could_move(tmp_path):
    """With few heads a random order is often the identity: it is drawn again. A group of one query head on one KV head has no other."""
    config = transformers.LlamaConfig(**(ROPE | {"num_attention_heads": 2, "num_key_value_heads": 1}))
    original = tmp_path / "two"
    transformers.LlamaForCausalLM(config).save_pretrained(original)
    for seed in range(12):
        scramble(original, tmp_path / "out", spaces=["heads"], seed=seed, overwrite=True)
        moved = {name for name, change in _changes(original, tmp_path / "out").items() if change > 1e-3}
        assert moved == {f"model.layers.{i}.self_attn.{part}_proj.weight" for i in range(2) for part in "qo"}


def test_a_space_without_freedom_is_a_note_beside_one_that_has_it(tmp_path):
    path = saved(tmp_path, "llama")
    written = scramble(path, tmp_path / "out", spaces=("experts", "vo"))
    assert written.notes == ("experts: nothing to move there in this architecture",)
    with pytest.raises(CosetError, match="choose from"):
        scramble(path, tmp_path / "other", spaces=("head",))


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "case"), PLAIN)
def test_sharded_bf16(tmp_path, family, case):
    path = saved(tmp_path, family, case, torch.bfloat16, "40KB")
    out = tmp_path / "out"
    written = scramble(path, out, seed=1)
    assert 1e-4 < written.rounding < 4e-3
    assert sorted(p.name for p in out.iterdir()) == sorted([*(p.name for p in path.iterdir()), "COSET.md"])
    assert (out / "config.json").read_bytes() == (path / "config.json").read_bytes()
    assert (out / "model.safetensors.index.json").read_bytes() == (path / "model.safetensors.index.json").read_bytes()
    _changes(path, out)  # same names, shapes and dtypes
    assert _gap(_outputs(out), _outputs(path)) < 0.1
    align(path, out, tmp_path / "back")
    back = _stored(tmp_path / "back")
    # Biases into which others were moved have lost more of their digits.
    assert all(c < (0.02 if back[name].ndim > 1 else 0.2) for name, c in _changes(path, tmp_path / "back").items())


def test_only_blocks_that_move_are_rewritten(tmp_path):
    path = saved(tmp_path, "llama", dtype=torch.bfloat16)
    scramble(path, tmp_path / "out", spaces=("qk", "vo", "neurons"), seed=1)
    changes = _changes(path, tmp_path / "out")
    assert all((c > 0) == (".self_attn." in n or ".mlp." in n) for n, c in changes.items())


def test_same_seed_same_bytes(tmp_path):
    path = saved(tmp_path, "mixtral")
    for name, seed in (("one", 5), ("two", 5), ("three", 6)):
        scramble(path, tmp_path / name, seed=seed, transform=tmp_path / f"{name}.safetensors")
    for file in ("{}/model.safetensors", "{}/COSET.md", "{}.safetensors"):
        one, two, three = ((tmp_path / file.format(name)).read_bytes() for name in ("one", "two", "three"))
        assert one == two
        assert one != three
    for name in ("a", "b"):
        align(path, tmp_path / "one", tmp_path / name)
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_what_was_done_is_recorded(tmp_path):
    path = saved(tmp_path, "llama")
    (path / "tokenizer.json").write_text("{}")
    (path / "README.md").write_text("the original's card")
    scramble(path, tmp_path / "out", seed=9, spaces=("vo",))
    metadata = load(tmp_path / "out").checkpoint.shards[0].metadata
    assert metadata["format"] == "pt"
    assert (metadata["coset_verb"], metadata["coset_seed"], metadata["coset_spaces"]) == ("scramble", "9", "vo")
    assert metadata["coset_version"]
    card = (tmp_path / "out/COSET.md").read_text()
    assert "seed: 9" in card
    assert f"version: {metadata['coset_version']}" in card
    assert (tmp_path / "out/README.md").read_text() == "the original's card"
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(("family", "case"), [("llama", "tied"), ("gpt2", "plain"), ("gemma", "plain")])
def test_untie(tmp_path, family, case):
    path, other, out = saved(tmp_path, family, case), tmp_path / "other", tmp_path / "out"
    config = json.loads((path / "config.json").read_text())
    config["nested"] = {"tie_word_embeddings": True}
    (path / "config.json").write_text(json.dumps(config))
    scramble(path, other, seed=3)
    align(path, other, out, untied=True, transform=tmp_path / "g.safetensors")
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert config["nested"]["tie_word_embeddings"] is False
    hf = _loaded(out)
    embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
    assert embedding.data_ptr() != head.data_ptr()
    model = load(out)
    assert not model.architecture.tied
    assert torch.equal(model.parameters(torch.float32)["head"].mT, head)
    assert torch.equal(model.parameters(torch.float32)["embed.tokens"], embedding)
    assert _gap(_outputs(out), _outputs(path)) < 1e-4
    apply(tmp_path / "g.safetensors", other, tmp_path / "again")
    assert max(_changes(out, tmp_path / "again").values()) == 0
    align(out, tmp_path / "again", tmp_path / "untied")
    with pytest.raises(CosetError, match="nothing to untie"):
        align(out, tmp_path / "again", tmp_path / "twice", untied=True)


def test_an_untied_alignment_returns_in_every_tensor(tmp_path):
    """Tied, the stream of a LayerNorm model may change its sign; untied, that is a turn with the opposite of 1, which the head's bias-free
    columns see where the final norm has a bias."""
    path, signs = saved(tmp_path, "gpt2"), set()
    original = load(path).parameters()
    original["head"] = original["embed.tokens"].mT
    assert original["final_norm.bias"].abs().max() > 0.1
    for seed in range(4):
        other, out = tmp_path / f"other{seed}", tmp_path / f"out{seed}"
        signs.add(float(scramble(path, other, seed=seed).transform.element["stream"].scale[0]))
        align(path, other, out, untied=True)
        found = load(out).parameters()
        assert max(_gap(found[name], x) for name, x in original.items()) < 1e-5
    assert signs == {1.0, -1.0}


def test_a_tied_model_stays_tied(tmp_path):
    path = saved(tmp_path, "llama", "tied")
    scramble(path, tmp_path / "out")
    hf = _loaded(tmp_path / "out")
    assert hf.get_input_embeddings().weight is hf.get_output_embeddings().weight
    assert "lm_head.weight" not in _stored(tmp_path / "out")


def test_what_an_invariant_head_reads_stays(tmp_path):
    """BERT's masked-language-model head is tied to the embedding, so a transform that moves it is refused."""
    path = saved(tmp_path, "bert", "base")
    scramble(path, tmp_path / "out", spaces=("shifts",), transform=tmp_path / "g.safetensors")
    assert _changes(path, tmp_path / "out")["embeddings.word_embeddings.weight"] > 0
    masked = saved(tmp_path, "bert")
    with pytest.raises(CosetError, match=r"embed\.tokens"):
        apply(tmp_path / "g.safetensors", masked, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


# --- elements that do not fit -----------------------------------------------------------------------------------------


def _element(tmp_path, family="llama", case="plain", **options):
    path, element = saved(tmp_path, family, case), tmp_path / "g.safetensors"
    scramble(path, tmp_path / "scrambled", transform=element, **options)
    return path, element


def test_elements_of_another_architecture_are_refused(tmp_path):
    _, element = _element(tmp_path)
    with pytest.raises(CosetError, match="another architecture"):
        apply(element, saved(tmp_path, "qwen2"), tmp_path / "out")


@pytest.mark.parametrize(
    ("leaf", "change"),
    [
        ("element/stream/", lambda x: x * 1.01),
        ("element/layers.0.heads/order", lambda x: torch.zeros_like(x)),
        ("element/layers.0.heads/inner.qk", lambda x: x + 0.1),
        ("element/layers.1.neurons/scale", lambda x: x * float("nan")),
        ("element/layers.1.neurons/order", lambda x: x[:-1]),
        ("target/layers.0.attention_norm.gain", lambda x: x * float("inf")),
        ("target/layers.0.attention_norm.gain", lambda x: x * 0),
    ],
)
def test_non_members_are_refused(tmp_path, leaf, change):
    path, element = _element(tmp_path)
    tensors = load_file(element)
    assert leaf in tensors
    tensors[leaf] = change(tensors[leaf]).contiguous()
    metadata = _metadata(element)
    save_file(tensors, element, metadata)
    with pytest.raises(CosetError, match=r"g\.safetensors|gain"):
        apply(element, path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _metadata(path):
    from safetensors import safe_open

    with safe_open(str(path), framework="pt") as file:
        return file.metadata()


def test_truncated_and_missing_elements_are_refused(tmp_path):
    path, element = _element(tmp_path)
    with pytest.raises(CosetError, match="no such transform"):
        apply(tmp_path / "none.safetensors", path, tmp_path / "out")
    element.write_bytes(element.read_bytes()[:-7])
    with pytest.raises(CosetError, match="not a readable safetensors file"):
        apply(element, path, tmp_path / "out")
    with pytest.raises(CosetError, match="not a transform"):
        apply(path / "model.safetensors", path, tmp_path / "out")


def test_elements_compose(tmp_path):
    path, element = _element(tmp_path, seed=1)
    architecture = load(path).architecture
    g = Transform.load(element, architecture)
    p = load(path).parameters()
    back = g.then(g.inverse())(p)
    assert all(_gap(back[name], p[name]) < 1e-9 for name in p)


# --- headers only ----------------------------------------------------------------------------------------------------


def test_inspect_reads_headers_only(tmp_path):
    path = saved(tmp_path, "llama")
    clean = facts(load(path))
    tensors = load_file(path / "model.safetensors")
    save_file({n: torch.full_like(t, torch.nan) for n, t in tensors.items()}, path / "model.safetensors", {"format": "pt"})
    assert facts(load(path)) == clean
    with pytest.raises(CosetError, match="NaN"):
        scramble(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_facts(tmp_path):
    found = facts(load(saved(tmp_path, "llama", dtype=torch.bfloat16, shards="40KB")))
    model = build("llama")
    assert found["architecture"]["parameters"] == model.num_parameters()
    assert (found["architecture"]["heads"], found["architecture"]["kv_heads"], found["architecture"]["head_dim"]) == (6, 3, 10)
    assert found["files"]["dtypes"] == ["BF16"]
    assert found["files"]["bytes"] == 2 * model.num_parameters()
    assert len(found["files"]["shards"]) > 2


def test_a_failure_leaves_neither_output_nor_element(tmp_path):
    path = saved(tmp_path, "llama")
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    bad = tmp_path / "bad"
    shutil.copytree(path, bad)
    save_file(tensors, bad / "model.safetensors", {"format": "pt"})
    before = sorted(tmp_path.iterdir())
    for run in (
        lambda: scramble(bad, tmp_path / "out", spaces=("vo",), transform=tmp_path / "g.safetensors"),
        lambda: align(path, bad, tmp_path / "out", spaces=("heads",), transform=tmp_path / "g.safetensors"),
        lambda: merge(path, [bad], tmp_path / "out"),
    ):
        with pytest.raises(CosetError, match=r"up_proj\.weight holds NaN or infinity"):
            run()
        assert sorted(tmp_path.iterdir()) == before
