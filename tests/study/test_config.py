"""Configurations: products, defaults, and one clear line for everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coset.errors import CosetError
from coset.study.config import load, parse
from coset.study.plan import identifiers, make
from study.configs import DIGITS, TEXT, document, toml, write_text

PRESETS = Path(__file__).parents[2] / "studies"


def fault(*tables: dict[str, Any], **top: Any) -> str:
    with pytest.raises(CosetError) as caught:
        parse(document(*tables, **top))
    return str(caught.value)


def missing(tmp_path: Path, *tables: dict[str, Any], **top: Any) -> str:
    return "\n".join(make(parse(document(*tables, **top), folder=tmp_path)).faults)


def test_lists_multiply_and_lists_by_nature_do_not() -> None:
    table = {**DIGITS, "pe": ["rope", "none"], "layers": [1, 3], "seeds": [4, 7, 9], "matchers": ["naive"]}
    found = parse(document(table)).settings
    assert [(s.pe, s.layers) for s in found] == [("rope", 1), ("rope", 3), ("none", 1), ("none", 3)]
    assert all(s.seeds == [4, 7, 9] and s.matchers == ["naive"] for s in found)
    assert len(set(identifiers(found))) == 4


def test_values_that_change_nothing_make_no_second_setting() -> None:
    found = parse(document({**DIGITS, "pe": ["rope", "none"], "rope_base": [10.0, 100.0], "ablations": False})).settings
    assert [(s.pe, s.rope_base) for s in found] == [("rope", 10.0), ("rope", 100.0), ("none", None)]
    found = parse(document({**DIGITS, "scope": ["whole", "first-layer"], "freeze": [True, False], "ablations": False})).settings
    assert [(s.scope, s.freeze) for s in found] == [("whole", False), ("first-layer", True), ("first-layer", False)]


def test_the_top_level_gives_defaults() -> None:
    table = {key: value for key, value in DIGITS.items() if key not in ("steps", "batch")}
    first, second = parse(document(table, {**table, "steps": 5, "batch": 3}, epochs=7, batch=11)).settings
    assert (first.epochs, first.steps, first.batch) == (7, None, 11)
    assert (second.epochs, second.steps, second.batch) == (None, 5, 3)


def test_names_hold_what_tells_settings_apart_and_no_more() -> None:
    tables = [{**DIGITS, "width": [24, 48]}, {**DIGITS, "width": 48, "pe": "none", "steps": 3}]
    del tables[1]["rope_base"]
    names = identifiers(parse(document(*tables)).settings)
    assert names == ["digits-vit-rope-first-attention-d24", "digits-vit-rope-first-attention-d48", "digits-vit-none-first-attention"]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"widht": 3}, "setting 1: widht: unknown key; did you mean width?"),
        ({"pe": "rotary"}, "setting 1: pe: expected one of sinusoidal, learned, rope, none, alibi, got 'rotary'"),
        ({"scope": "middle-layer"}, "setting 1: scope: expected one of first-attention, "),
        ({"matchers": ["naive", "two_stages"]}, "got 'two_stages'; did you mean two_stage?"),
        ({"layers": 0}, "setting 1: layers: input should be greater than or equal to 1, got 0"),
        ({"layers": []}, "setting 1: layers: expected at least one value, got an empty list"),
        ({"width": "wide"}, "setting 1: width: input should be a valid integer, got 'wide'"),
        ({"width": 25}, "setting 1: width: 25 is not a multiple of 3 heads"),
        ({"width": 10**18}, "setting 1: width: input should be less than or equal to 10000000, got 1000000000000000000"),
        ({"kv_heads": 2}, "setting 1: kv_heads: 3 heads are not a multiple of 2"),
        ({"seeds": 1}, "setting 1: seeds: a pair needs at least 2, got [1]"),
        ({"seeds": [3, 3]}, "setting 1: seeds: [3, 3] holds a value twice"),
        ({"epochs": 2}, "setting 1: epochs, steps: give one of them"),
        ({"vocabulary": 100}, "setting 1: vocabulary: no task among digits takes it"),
        ({"scope": "whole"}, "setting 1: ablations: they need an attention scope"),
        ({"scope": "whole", "ablations": False, "freeze": True}, "setting 1: freeze: the scope whole leaves nothing to freeze"),
        ({"pe": "none"}, "setting 1: rope_base: only pe rope has one, got none"),
        ({"learning_rate": -1.0}, "setting 1: learning_rate: input should be greater than 0, got -1.0"),
    ],
)
def test_what_is_wrong_is_one_line(change: dict[str, Any], line: str) -> None:
    message = fault({**DIGITS, **change})
    assert line in message
    assert len(message.splitlines()) == 2, message


def test_every_fault_is_listed() -> None:
    message = fault({**DIGITS, "pe": "rotary", "sope": 1}, {**TEXT, "layers": -1}, pionts=3)
    assert [line.split(":")[0] for line in message.splitlines()[1:]] == ["pionts", "setting 1", "setting 1", "setting 2"]
    assert "did you mean points?" in message


def test_top_level_faults(tmp_path: Path) -> None:
    with pytest.raises(CosetError, match="name: missing"):
        parse({key: value for key, value in document(DIGITS).items() if key != "name"})
    with pytest.raises(CosetError, match=r"at least one table \[\[setting\]\]"):
        parse(document())
    with pytest.raises(CosetError, match="points: input should be greater"):
        parse(document(DIGITS, points=1))
    with pytest.raises(CosetError, match="epochs: missing; give epochs or steps"):
        parse(document({key: value for key, value in DIGITS.items() if key != "steps"}))
    with pytest.raises(CosetError, match="there is no such file"):
        load(tmp_path / "nothing.toml")
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(CosetError, match="is not TOML"):
        load(tmp_path / "bad.toml")


def test_what_the_data_does_not_allow_is_known_before_training(tmp_path: Path) -> None:
    write_text(tmp_path / "words.txt")
    assert missing(tmp_path, DIGITS, TEXT) == ""
    assert "words.csv: there is no such file; path names any file" in missing(tmp_path, {**TEXT, "path": "words.csv"})
    assert "path: missing" in missing(tmp_path, {key: value for key, value in TEXT.items() if key != "path"})
    assert "vit learns images, and the task text has next tokens; try: gpt2, llama" in missing(
        tmp_path, {**TEXT, "model": "vit", "kv_heads": 1}
    )
    assert "bert learns classes of texts, and the task digits has images; try: vit" in missing(tmp_path, {**DIGITS, "model": "bert"})
    assert "patch: 3 does not divide images of 8 by 8" in missing(tmp_path, {**DIGITS, "patch": 3})
    assert "train_size: 2000 samples asked for, there are 1727" in missing(tmp_path, {**DIGITS, "train_size": 2000})
    assert "train_size, test_size: 50 and 999 samples asked for, there are 489" in missing(tmp_path, {**TEXT, "test_size": 999})
    # A head of 6 lanes has no planes to share out over rows and columns.
    assert "digits-vit-rope-first-attention: axial rotary width: expected a multiple of 4" in missing(tmp_path, {**DIGITS, "heads": 4})
    assert "expected an even width" in missing(tmp_path, {**TEXT, "pe": "sinusoidal", "width": 9, "heads": 3})


def test_written_configurations_read_back(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(toml(document(DIGITS, TEXT)))
    assert load(tmp_path / "study.toml") == parse(document(DIGITS, TEXT), folder=tmp_path)


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.toml")), ids=lambda path: path.stem)
def test_presets_are_valid(preset: Path) -> None:
    study = load(preset)
    assert study.name == preset.stem
    names = identifiers(study.settings)
    assert len(set(names)) == len(names)
    assert not any("~" in name for name in names)
    assert all(len(s.seeds) >= 3 and s.matchers[0] == "naive" for s in study.settings)
    if preset.stem == "small":
        cells = {(s.task, s.pe, s.scope) for s in study.settings}
        assert len(cells) == 5 * 3 * 4
