"""The matchers on checkpoints, through the command line: what is written computes what it did, and says how it came about."""

import json
import re
from typing import get_args, get_type_hints

import pytest
import torch
import transformers
from safetensors.torch import save_file

from checkpoint_zoo import saved
from command_line import refused, run_json
from coset.alignment import Learning, Matching, Solvers, learned
from coset.alignment.matchers import MATCHERS, SOURCES
from coset.alignment.sources import sample_text
from coset.checkpoint import load
from coset.checkpoint.operations import align, merge
from coset.cli.app import run
from coset.cli.options import MatchingFlags
from coset.connect import Refit
from coset.transformer import forward

VOCABULARY, CONTEXT = 37, 30
COMMON = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None}
MADE = ("--match-samples", 70, "--match-length", 16)
STEPS = ("--steps", 30)


def _gpt2():
    config = transformers.GPT2Config(n_embd=27, n_layer=2, n_head=3, n_inner=45, n_positions=CONTEXT, pad_token_id=None, **COMMON)
    return transformers.GPT2LMHeadModel(config)


def _llama():
    sizes = {"hidden_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    config = transformers.LlamaConfig(**sizes, intermediate_size=45, max_position_embeddings=CONTEXT, pad_token_id=None, **COMMON)
    return transformers.LlamaForCausalLM(config)


def _saved(folder, family, seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = {"gpt2": _gpt2, "llama": _llama}[family]()
        with torch.no_grad():
            for x in model.parameters():
                x.copy_(0.3 * torch.randn(x.shape) if x.ndim > 1 else x + 0.2 * torch.randn(x.shape))
    path = folder / f"{family}-{seed}"
    model.to(dtype).save_pretrained(path)
    return path


@pytest.fixture(params=["gpt2", "llama"])
def family(request):
    return request.param


@pytest.fixture
def ids(tmp_path):
    data = tmp_path / "ids.safetensors"
    save_file({"input_ids": _ids(80, 20)}, data)
    return data


def _ids(samples, length, seed=3):
    return torch.randint(VOCABULARY, (samples, length), generator=torch.Generator().manual_seed(seed))


def _logits(folder):
    kind = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    model, report = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        return model.eval()(input_ids=_ids(3, CONTEXT, seed=11)).logits.double()


def _gap(a, b):
    return float((a - b).norm() / b.norm())


def _changes(a, b):
    one, two = (load(folder).parameters() for folder in (a, b))
    return max(_gap(two[name], x) for name, x in one.items())


def _flags(matcher, data):
    return {
        "weights": (),
        "activations": ("--data", data),
        "learned": (*MADE, *STEPS),
    }.get(matcher, MADE)


# --- align ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matcher", ["probes", "self", "activations", "learned"])
def test_other_seeds_keep_their_function(capsys, tmp_path, ids, family, matcher):
    one, two = (_saved(tmp_path, family, seed) for seed in (0, 1))
    out, g = tmp_path / "out", tmp_path / "g.safetensors"
    found = run_json(capsys, "align", one, two, "-o", out, "--matcher", matcher, *_flags(matcher, ids), "--seed", 5, "--transform", g)
    assert _gap(_logits(out), _logits(two)) < 1e-4
    assert _gap(_logits(out), _logits(one)) > 0.1
    assert run_json(capsys, "compare", two, out)["verdict"] == "equivalent"
    assert found["matcher"] == found["matching"]["matcher"] == matcher
    source = "self" if matcher == "learned" else matcher
    said = {"matcher": matcher, "source": source, "seed": "5", "samples": "80" if matcher == "activations" else "70"}
    if matcher == "activations":
        said["data"] = "ids.safetensors"
    if matcher == "learned":
        losses = [step["objective"] for step in found["history"]]
        assert found["history"][0]["step"] == "start"
        assert min(losses) < losses[0]
        said |= {"loss": "agreement", "steps": "30", "heldout_loss_start": f"{losses[0]:.6g}", "heldout_loss_end": f"{min(losses):.6g}"}
    metadata, card = load(out).checkpoint.shards[0].metadata, (out / "COSET.md").read_text()
    for key, value in said.items():
        assert found["matching"][key] == metadata[f"coset_{key}"] == value
        assert f"- {key}: {value}\n" in card
    run_json(capsys, "apply", g, two, "-o", tmp_path / "again")
    assert _changes(out, tmp_path / "again") == 0


def test_double_precision_is_kept(capsys, tmp_path, family):
    one, two = (_saved(tmp_path, family, seed, torch.float64) for seed in (0, 1))
    for matcher in ("self", "learned"):
        run_json(capsys, "align", one, two, "-o", tmp_path / matcher, "--matcher", matcher, *_flags(matcher, None))
        # Not by transformers, whose norms compute in float32.
        outputs = [forward(m.architecture, m.parameters(), _ids(3, CONTEXT)) for m in map(load, (tmp_path / matcher, two))]
        assert _gap(*outputs) < 1e-11


@pytest.mark.parametrize("matcher", MATCHERS)
def test_a_planted_element_comes_back(capsys, tmp_path, ids, family, matcher):
    path, other, out = _saved(tmp_path, family), tmp_path / "other", tmp_path / "out"
    run_json(capsys, "scramble", path, "-o", other, "--seed", 2)
    found = run_json(capsys, "align", path, other, "-o", out, "--matcher", matcher, *_flags(matcher, ids))
    assert all(d["before"] > 0.1 for d in found["distances"][1:])
    assert _changes(path, out) < 1e-3
    assert _gap(_logits(out), _logits(path)) < 1e-4


def test_an_untied_output(capsys, tmp_path):
    one, two = (_saved(tmp_path, "gpt2", seed) for seed in (0, 1))
    found = run_json(capsys, "align", one, two, "-o", tmp_path / "out", "--matcher", "self", "--untie", *MADE)
    tied = run_json(capsys, "align", one, two, "-o", tmp_path / "tied", "--matcher", "self", *MADE)
    assert json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"] is False
    assert _gap(_logits(tmp_path / "out"), _logits(two)) < 1e-4
    assert found["history"][-1]["objective"] < tied["history"][-1]["objective"]


def test_spaces(capsys, tmp_path):
    path = _saved(tmp_path, "llama")
    run_json(capsys, "scramble", path, "-o", tmp_path / "other", "--spaces", "heads,qk,vo")
    run_json(capsys, "align", path, tmp_path / "other", "-o", tmp_path / "out", "--matcher", "probes", "--spaces", "heads", *MADE)
    assert _changes(path, tmp_path / "out") < 1e-4


def test_encoders(capsys, tmp_path):
    """BERT's masked-language-model head pins the embedding; nobody writes text with it, so random inputs are the default."""
    path, other = saved(tmp_path, "bert"), tmp_path / "other"
    run_json(capsys, "scramble", path, "-o", other)
    for matcher, flags in (("probes", ()), ("learned", ("--steps", 1))):
        found = run_json(capsys, "align", path, other, "-o", tmp_path / matcher, "--matcher", matcher, *MADE, *flags)
        assert found["matching"]["source"] == "probes"
        assert _changes(path, tmp_path / matcher) < 1e-3
    message = refused(capsys, tmp_path, "align", path, other, "-o", tmp_path / "out", "--matcher", "self")
    assert "only a causal language model can write text; use probes" in message


def test_images(capsys, tmp_path):
    path, other, data = saved(tmp_path, "vit"), tmp_path / "other", tmp_path / "data.safetensors"
    run_json(capsys, "scramble", path, "-o", other)
    save_file({"inputs": torch.randn(7, 143, 48, generator=torch.Generator().manual_seed(0))}, data)
    run_json(capsys, "align", path, other, "-o", tmp_path / "out", "--matcher", "activations", "--data", data)
    assert _changes(path, tmp_path / "out") < 1e-3
    save_file({"inputs": torch.randn(7, 142, 48)}, data)
    message = refused(capsys, tmp_path, "align", path, other, "-o", tmp_path / "no", "--matcher", "activations", "--data", data)
    assert "inputs must be floating-point patches [n, patches=143, features=48], got torch.float32 of shape [7, 142, 48]" in message


def test_sizes_without_a_context(capsys, tmp_path):
    """RoPE allows any length: memory decides, before anything is read or made."""
    path = _saved(tmp_path, "llama")
    for verb, flags in (
        ("align", ("--matcher", "self", "--match-samples", 10**12)),
        ("align", ("--matcher", "probes", "--match-length", 10**12)),
        ("align", ("--matcher", "learned", "--steps", 1, "--match-length", 10**11)),
        ("merge", ("--refit", "--match-samples", 10**12)),
    ):
        message = refused(capsys, tmp_path, verb, path, path, "-o", tmp_path / "out", *flags)
        assert "and this machine has" in message
        assert "ask for fewer inputs, or shorter ones" in message


# --- learned ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_continues(capsys, tmp_path, monkeypatch):
    one, two = (_saved(tmp_path, "llama", seed) for seed in (0, 1))
    state = tmp_path / "state.safetensors"

    def command(name, *more):
        words = ["align", one, two, "-o", tmp_path / name, "--matcher", "learned", *MADE, *STEPS, *more]
        return run([*map(str, words), "--quiet"])

    assert command("straight") == 0
    save = learned._Run.save

    def interrupted(self, done):
        save(self, done)
        raise KeyboardInterrupt

    before = sorted(tmp_path.rglob("*"))
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(learned._Run, "save", interrupted)
        assert command("resumed", "--state", state) == 130
    note, error = capsys.readouterr().err.splitlines()
    assert f"{state} holds the state of learning: give the same command again" in note
    assert error == "coset: error: interrupted"
    assert sorted(tmp_path.rglob("*")) == sorted([*before, state])
    words = ("align", one, two, "-o", tmp_path / "resumed", "--matcher", "learned", *MADE, "--state", state)
    assert "belongs to another run" in refused(capsys, tmp_path, *words, "--steps", 41)
    assert command("resumed", "--state", state) == 0
    assert not state.exists()
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "resumed")]
    assert files[0] == files[1]


def test_learning_that_diverges_says_so_and_returns_the_best(tmp_path):
    one, two = (_saved(tmp_path, "gpt2", seed) for seed in (0, 1))
    how = Matching("learned", samples=40, length=12, learning=Learning(steps=30, rate=1e3))
    written = align(one, two, tmp_path / "out", how=how)
    assert any("stopped being finite" in note or "nothing better than the start" in note for note in written.notes)
    assert _gap(_logits(tmp_path / "out"), _logits(two)) < 1e-4


def test_learning_on_labels(capsys, tmp_path, ids):
    one, two = (_saved(tmp_path, "gpt2", seed) for seed in (0, 1))
    words = ("align", one, two, "-o", tmp_path / "out", "--matcher", "learned", "--task", *STEPS)
    assert "task" in refused(capsys, tmp_path, *words)
    assert run_json(capsys, *words, "--data", ids)["matching"]["loss"] == "task"


# --- merge ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("matcher", ["weights", "self"])
def test_several_models_in_any_order(capsys, tmp_path, matcher):
    models = [_saved(tmp_path, "llama", seed) for seed in range(3)]
    flags = (*_flags(matcher, None), "--spaces", "heads,neurons")
    for name, order in (("one", (1, 2)), ("two", (2, 1))):
        found = run_json(capsys, "merge", models[0], *(models[i] for i in order), "-o", tmp_path / name, "--matcher", matcher, *flags)
    assert found["matcher"] == matcher
    assert found["on_the_line"] is True
    assert _changes(tmp_path / "one", tmp_path / "two") < 1e-6
    objectives = [step["objective"] for step in found["history"]]
    assert objectives == sorted(objectives, reverse=True)
    assert len(objectives) > 1 if matcher == "weights" else not objectives
    if matcher == "weights":
        assert run(["merge", *map(str, models), "-o", str(tmp_path / "three")]) == 0
        assert run(["merge", *map(str, models[:2]), "-o", str(tmp_path / "two models")]) == 0
        several, pair, _ = " ".join(capsys.readouterr().out.split()).split("Written")
        assert re.search(r"Matched by weights: objective [\d.]+ \(start\) -> [\d.]+ \(round \d\)\.", several)
        assert re.search(r"Matched by weights: objective [\d.]+ \(start\) -> [\d.]+ \(", pair)


def test_models_too_large_to_hold_together_are_merged_one_by_one(tmp_path, monkeypatch):
    path = _saved(tmp_path, "llama")
    others = []
    for seed in (1, 2):
        others.append(tmp_path / f"other{seed}")
        assert run(["scramble", str(path), "-o", str(others[-1]), "--seed", str(seed), "--quiet"]) == 0
    monkeypatch.setattr("coset.checkpoint.matching.ROUNDS_LIMIT", 100)
    written = merge(path, others, tmp_path / "out")
    assert "too many to hold at once" in written.notes[0]
    assert _changes(path, tmp_path / "out") < 1e-5


def test_refit(capsys, tmp_path, ids, family):
    models = [_saved(tmp_path, family, seed) for seed in range(3)]
    merged = run_json(capsys, "merge", *models, "-o", tmp_path / "merged", "--matcher", "self", *MADE)
    assert "refit" not in merged
    for name, flags in (("self", ("--matcher", "self", *MADE)), ("data", ("--matcher", "activations", "--data", ids))):
        found = run_json(capsys, "merge", *models, "-o", tmp_path / name, "--refit", *flags)
        assert found["on_the_line"] is False
        assert found["refit"]["heldout_disagreement_after"] < found["refit"]["heldout_disagreement_before"]
        assert found["matching"]["refit_source"] == {"data": "activations"}.get(name, "self")
        assert found["refit"]["worse"] is False
        card = (tmp_path / name / "COSET.md").read_text()
        assert "WORSE" not in card
        assert card.startswith("# Refitted model")
        assert "NOT on the line between the models" in card
        assert (tmp_path / name / "config.json").read_bytes() == (models[0] / "config.json").read_bytes()
        assert bool(_logits(tmp_path / name).isfinite().all())
    assert _gap(_logits(tmp_path / "self"), _logits(tmp_path / "merged")) > 0.01
    # The embedding is no linear map of activations: it stays the mean.
    kept, mean = (load(tmp_path / name).parameters()["embed.tokens"] for name in ("self", "merged"))
    assert _gap(kept, mean) < 1e-6


def test_a_refit_that_makes_things_worse_says_so_everywhere(capsys, tmp_path, monkeypatch):
    """Forced: a refit by least squares seldom is, but on few inputs nothing keeps it from it."""
    models = [_saved(tmp_path, "llama", seed) for seed in range(2)]
    monkeypatch.setattr(
        "coset.checkpoint.matching.refit",
        lambda architecture, merged, ends, inputs, **options: Refit({name: -9 * x for name, x in merged.items()}, ()),
    )
    words = ["merge", *map(str, models), "--refit", "--match-samples", "9", "--match-length", "7"]
    assert run([*words, "-o", str(tmp_path / "json"), "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["refit"]["worse"] is True
    assert found["refit"]["heldout_disagreement_after"] > found["refit"]["heldout_disagreement_before"]
    assert any("made things WORSE" in note for note in found["notes"])
    assert "coset: warning: refit: it made things WORSE" in err
    warning = "this model is WORSE than the mean that it was refitted from"
    assert f"- refit_warning: {warning}\n" in (tmp_path / "json/COSET.md").read_text()
    assert load(tmp_path / "json").checkpoint.shards[0].metadata["coset_refit_warning"] == warning
    assert run([*words, "-o", str(tmp_path / "plain"), "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert "WORSE than the plain mean" in " ".join(out.split())
    assert err == ""


def test_a_refit_reads_text_of_every_model(tmp_path, monkeypatch):
    models = [_saved(tmp_path, "llama", seed) for seed in range(3)]
    asked = []
    monkeypatch.setattr(
        "coset.alignment.matchers.sample_text",
        lambda architecture, ends, samples, **options: asked.append((ends, samples)) or sample_text(architecture, ends, samples, **options),
    )
    how = Matching(samples=12, length=7)
    written = merge(models[0], models[1:], tmp_path / "out", how=how, spaces=("heads", "neurons"), refit=True)
    [(ends, samples)] = asked
    assert samples == 12
    assert written.matching["refit_samples"] == "11"  # one is held out
    # Aligned, every end is the function of its own model.
    for end, path in zip(ends, models, strict=True):
        own = load(path)
        outputs = [forward(own.architecture, p, _ids(3, 9)) for p in (end, own.parameters(torch.float32))]
        assert _gap(*outputs) < 1e-4


def test_several_models_are_matched_with_the_solvers_that_were_asked_for(tmp_path):
    models = [_saved(tmp_path, "llama", seed) for seed in range(3)]
    for name, how in (("default", Matching(cycles=1)), ("asked", Matching(cycles=1, solvers=Solvers(linear="orthogonal")))):
        merge(models[0], models[1:], tmp_path / name, how=how, spaces=("heads", "qk", "vo"))
    assert _changes(tmp_path / "default", tmp_path / "asked") > 1e-3


def test_a_refit_of_copies_changes_nothing(capsys, tmp_path, ids):
    path, other = _saved(tmp_path, "llama"), tmp_path / "other"
    run_json(capsys, "scramble", path, "-o", other)
    for name, flags, source in (("made", MADE, "self"), ("data", ("--data", ids), "activations")):
        found = run_json(capsys, "merge", path, other, "-o", tmp_path / name, "--refit", *flags)
        assert (found["matcher"], found["matching"]["refit_source"]) == ("weights", source)
        assert _gap(_logits(tmp_path / name), _logits(path)) < 1e-4


# --- barrier ----------------------------------------------------------------------------------------------------------


def test_barrier_aligns_first(capsys, tmp_path, ids, family):
    path, other = _saved(tmp_path, family), tmp_path / "other"
    run_json(capsys, "scramble", path, "-o", other)
    words = ("barrier", path, other, "--data", ids, "--points", 3)
    naive = run_json(capsys, *words)
    assert naive["matcher"] is None
    for matcher, flags in (("weights", ()), ("self", MADE), ("activations", ()), ("activations", ("--match-data", ids))):
        found = run_json(capsys, *words, "--matcher", matcher, *flags)
        assert found["matcher"] == found["matching"]["matcher"] == matcher
        assert found["loss"][0] == pytest.approx(naive["loss"][0], rel=1e-5)
        # Random models guess at random, so halfway may be better than the ends; between copies it is neither.
        assert abs(found["loss"][1] - found["loss"][0]) < 1e-3 < abs(naive["loss"][1] - naive["loss"][0])
        same = [note for note in found["notes"] if "matched on the inputs that the barrier is measured on" in note]
        assert len(same) == (matcher == "activations" and not flags)


# --- bad input --------------------------------------------------------------------------------------------------------


def test_flags_name_every_matcher_and_source():
    hints = get_type_hints(MatchingFlags)
    assert get_args(get_args(hints["matcher"])[0]) == MATCHERS
    assert get_args(get_args(hints["source"])[0]) == SOURCES


def test_data_that_do_not_fit(capsys, tmp_path):
    path, data = _saved(tmp_path, "gpt2"), tmp_path / "data.safetensors"
    words = ("align", path, path, "-o", tmp_path / "out", "--matcher", "activations")
    assert "activations" in refused(capsys, tmp_path, *words)
    assert "no such data file" in refused(capsys, tmp_path, *words, "--data", data)
    for tensors, message in (
        ({"input_ids": _ids(5, 31)}, "sequences of 31 tokens are longer than the model's context of 30"),
        ({"input_ids": _ids(5, 9) + 1}, "token ids must lie in 0..36, got"),
        ({"input_ids": _ids(5, 9)[0]}, "inputs must be int64 token ids [n, length], got torch.int64 of shape [9]"),
        ({"inputs": torch.ones(5, 9)}, "inputs must be int64 token ids [n, length], got torch.float32 of shape [5, 9]"),
        ({"input_ids": _ids(5, 9)[:0]}, "inputs are empty, shape [0, 9]; expected at least one"),
        ({"input_ids": _ids(5, 9) > 3}, "must be integers or floating point, got torch.bool"),
        ({"tokens": _ids(5, 9)}, "expected tensors input_ids"),
        # Targets that this matcher does not read.
        ({"inputs": _ids(5, 9), "targets": _ids(4, 9)}, "targets must be int64 of shape [5, 9], got torch.int64 of shape [4, 9]"),
        ({"inputs": _ids(5, 9), "targets": torch.ones(5, 9)}, "targets must be int64 of shape [5, 9], got torch.float32"),
        ({"inputs": _ids(5, 9), "targets": _ids(5, 9) + 1}, "targets must lie in 0..36, got"),
        ({"inputs": _ids(5, 9), "targets": torch.full((5, 9), -100)}, "every target is -100"),
    ):
        save_file(tensors, data)
        assert message in refused(capsys, tmp_path, *words, "--data", data)
    # What would be cut off is looked at, too.
    save_file({"inputs": _ids(5, 9), "targets": _ids(6, 9)}, data)
    assert "targets must be int64 of shape [5, 9]" in refused(capsys, tmp_path, *words, "--data", data, "--match-samples", 3)
    save_file({"input_ids": _ids(1, 9)}, data)
    assert "at least two inputs" in refused(capsys, tmp_path, *words[:-1], "learned", "--data", data)


def test_too_few_inputs_are_refused_before_matching(capsys, tmp_path, ids, monkeypatch):
    path = _saved(tmp_path, "gpt2")
    for name in ("operations.find", "operations.find_all", "curves.find"):
        monkeypatch.setattr(f"coset.checkpoint.{name}", None)
    out = ("-o", tmp_path / "out", "--match-samples", 1)
    learned, activations = ("--matcher", "learned"), ("--matcher", "activations", "--data", ids)
    for words in (
        ("merge", path, path, "--refit", *out),
        ("merge", path, path, "--refit", "--data", ids, *out),
        ("merge", path, path, "--refit", *activations, *out),
        ("merge", path, path, "--refit", "--matcher", "probes", *out),
        ("merge", path, path, *learned, *out),
        ("align", path, path, *learned, *out),
        ("align", path, path, *learned, "--data", ids, *out),
        ("barrier", path, path, *learned, "--data", ids, *out[2:]),
    ):
        assert "expected at least two inputs, one of them to hold out, got 1; ask for more samples" in refused(capsys, tmp_path, *words)


def test_targets_that_nobody_reads(capsys, tmp_path):
    vit, headless, data = saved(tmp_path, "vit"), saved(tmp_path, "bert", "base"), tmp_path / "data.safetensors"
    images = torch.randn(7, 143, 48, generator=torch.Generator().manual_seed(0))
    ids = torch.ones(7, 5, dtype=torch.int64)
    for path, inputs, targets, message in (
        (vit, images, torch.tensor([0, 1, 2, 3, 4, -100, 0], dtype=torch.int32), None),
        (vit, images, torch.tensor([0, 1, 2, 3, 5, 0, 0]), "targets must lie in 0..4, got 0..5"),
        (vit, images, torch.zeros(7, 1), "targets must be int64 of shape [7], got torch.float32 of shape [7, 1]"),
        # Without a head nothing is predicted, so anything goes that belongs to the inputs.
        (headless, ids, torch.randn(7), None),
        (headless, ids, torch.randn(6), "targets must be as many as the 7 inputs, got shape [6]"),
    ):
        save_file({"inputs": inputs, "targets": targets}, data)
        words = ("align", path, path, "-o", tmp_path / "out", "--matcher", "activations", "--data", data, "--overwrite")
        if message is None:
            run_json(capsys, *words)
        else:
            assert f"{data}: {message}" in refused(capsys, tmp_path, *words)


def test_a_barrier_looks_at_its_data_before_it_matches(capsys, tmp_path, monkeypatch):
    path, data = saved(tmp_path, "bert", "base"), tmp_path / "data.safetensors"
    save_file({"input_ids": torch.ones(7, 5, dtype=torch.int64)}, data)
    monkeypatch.setattr("coset.checkpoint.curves.find", None)
    message = refused(capsys, tmp_path, "barrier", path, path, "--data", data, "--matcher", "weights")
    assert f"{path}: BertModel has no head that is computed here" in message
    task = ("align", path, path, "-o", tmp_path / "out", "--matcher", "learned", "--task", "--data", data)
    assert "so there is no loss" in refused(capsys, tmp_path, *task)


def test_texts(capsys, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    path, text = _saved(tmp_path, "gpt2"), tmp_path / "text.txt"
    text.write_text(" ".join(f"w{i % VOCABULARY}" for i in range(200)))
    words = ("align", path, path, "-o", tmp_path / "out", "--matcher", "activations", "--data", text)
    assert "no tokenizer.json" in refused(capsys, tmp_path, *words)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    found = run_json(capsys, *words)
    assert (found["matching"]["samples"], found["matching"]["length"]) == ("6", "30")
    other = (*words[:4], tmp_path / "other", *words[5:])
    assert "windows of 31 tokens: they hold at least 2, and the model's context is 30" in refused(
        capsys, tmp_path, *other, "--match-length", 31
    )
    text.write_text("w1 w2 w3")
    assert "3 tokens are too few for one window of 30" in refused(capsys, tmp_path, *other)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--matcher", "probes", "--data", "DATA"), "matcher probes reads no data"),
        (("--data", "DATA"), "matcher weights reads no data"),
        (("--matcher", "learned", "--source", "self", "--data", "DATA"), "matcher learned with source self reads no data"),
        (("--matcher", "learned", "--source", "activations"), "there are none"),
        (("--matcher", "learned", "--steps", 0), "--steps: expected an integer from 1"),
        (("--matcher", "self", "--steps", 5), "--steps: it has no meaning with --matcher self"),
        (("--state", "s"), "--state: it has no meaning with --matcher weights"),
        (("--task", "--matcher", "search"), "--task: it has no meaning"),
        (("--source", "self", "--matcher", "probes"), "--source: it has no meaning"),
        (("--match-samples", 4), "--match-samples: it has no meaning with --matcher weights"),
        (("--matcher", "self", "--match-samples", 0), "--match-samples: expected an integer from 1"),
        (("--matcher", "self", "--match-length", -3), "--match-length: expected an integer from 1"),
        (
            ("--matcher", "self", "--match-samples", 10**12),
            "1,000,000,000,000 inputs of 30 tokens need at least 720,000.0 GB while they are made",
        ),
        (("--matcher", "probes", "--match-length", 10**12), "inputs of 1,000,000,000,000 tokens are longer than the model's context of 30"),
        (("--matcher", "self", "--match-samples", 2**63), "--match-samples: expected an integer from 1 to 9223372036854775807"),
        (("--spaces", "hats"), "--spaces: hats; choose from heads"),
        (("--matcher", "learned", "--task"), "--task: the task's loss is measured on your data"),
        (("--matcher", "probes", "--match-length", 31), "inputs of 31 tokens are longer than the model's context of 30"),
        (("--matcher", "learned", "--state", "no/s"), "does not exist"),
        (("--matcher", "learned", "--state", "."), "a folder"),
        (("--matcher", "learned", "--spaces", "neurons", *MADE), "no continuous freedom"),
        (("--matcher", "search", "--spaces", "neurons", *MADE), "add heads"),
        (("--matcher", "self", "--seed", -1), "--seed: expected an integer from 0"),
    ],
)
def test_flags_that_do_not_go_together(capsys, tmp_path, ids, flags, message):
    path = _saved(tmp_path, "gpt2")
    flags = [ids if flag == "DATA" else flag for flag in flags]
    assert message in refused(capsys, tmp_path, "align", path, path, "-o", tmp_path / "out", *flags)


def test_merges_and_barriers_that_make_no_sense(capsys, tmp_path, ids):
    path = _saved(tmp_path, "gpt2")
    state = tmp_path / "s.safetensors"
    merges = ("merge", path, path, "-o", tmp_path / "out")
    assert "error: --refit: it aims" in refused(capsys, tmp_path, *merges, "--refit", "--weight", 0.5)
    assert "and align" in refused(capsys, tmp_path, *merges, "--refit", "--no-align")
    assert "--matcher, --seed: it says how to align" in refused(capsys, tmp_path, *merges, "--no-align", "--matcher", "self", "--seed", 1)
    assert "--data: it says how to align" in refused(capsys, tmp_path, *merges, "--no-align", "--data", ids)
    several = ("merge", path, path, path, "-o", tmp_path / "out", "--matcher", "learned", "--state", state)
    assert "one state serves one pair" in refused(capsys, tmp_path, *several)
    for flag, other in (("--transform", "align"), ("--plot", "barrier")):
        place = tmp_path / ("one.safetensors" if flag == "--transform" else "one.png")
        more = ("-o", tmp_path / "out") if other == "align" else ("--data", ids)
        words = (other, path, path, *more, "--matcher", "learned", "--state", place, flag, place)
        assert "another output of the same command" in refused(capsys, tmp_path, *words)
    inside = ("align", path, path, "-o", tmp_path / "out", "--matcher", "learned", "--state", path / "s")
    assert "inside a checkpoint folder" in refused(capsys, tmp_path, *inside)
    state.write_text("not a state")
    garbage = ("align", path, path, "-o", tmp_path / "out", "--matcher", "learned", *MADE, "--state", state)
    assert "not a readable state" in refused(capsys, tmp_path, *garbage)
    barriers = ("barrier", path, path, "--data", ids, "--points", 2)
    assert "--spaces: it says how to align" in refused(capsys, tmp_path, *barriers, "--spaces", "heads")
    assert "--match-data: it says how to align" in refused(capsys, tmp_path, *barriers, "--match-data", ids)
