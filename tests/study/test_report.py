"""The report without a browser: tables, figures, findings, escaping, and what damaged results lead to."""

from __future__ import annotations

import copy
import csv
import json
import struct
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_study
from coset.errors import CosetError
from coset.study.report import write_report
from coset.study.report.analysis import answer, best, contrasts, leader, summarise, sweeps, uncertain
from coset.study.report.names import details, estimate, number, slugs
from coset.study.report.page import page
from coset.study.report.results import Estimate, Study, read
from coset.study.report.tables import markdown


def tiny() -> dict[str, Any]:
    """One task, two encodings, two scopes: quick to draw."""
    document = fake_study.study()
    document["settings"] = [
        fake_study.setting(i, "digits", "vit", pe, scope, ablated=True)
        for i, (pe, scope) in enumerate([("rope", "whole"), ("rope", "first-attention"), ("none", "whole"), ("none", "first-attention")])
    ]
    return document


def load(folder: Path, document: dict[str, Any]) -> Study:
    (folder / "results.json").write_text(json.dumps(document))
    return read(folder)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    (folder / "results.json").write_text(json.dumps(tiny()))
    paths = write_report(folder)
    assert sorted(paths) == sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "results.json")
    return folder


def test_every_kind_of_file_is_written(written: Path) -> None:
    names = {str(p.relative_to(written)) for p in written.rglob("*") if p.is_file()}
    tables = ("answer", "encodings", "settings", "barriers", "pairs", "models", "symmetry", "ablations", "failures")
    figures = ("barriers", "curves-digits-vit-loss", "curves-digits-vit-accuracy", "distance")
    assert names == {
        "results.json",
        "report.html",
        "summary.md",
        "tables/tables.json",
        *(f"tables/{name}.csv" for name in tables),
        *(f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")),
    }


def test_same_results_same_bytes_and_run_times_do_not_count(written: Path, tmp_path: Path) -> None:
    document = tiny()
    for setting in document["settings"]:
        setting["timing"] = {"train": 99.0}
    (tmp_path / "results.json").write_text(json.dumps(document, indent=3))
    for path in write_report(tmp_path):
        assert path.read_bytes() == (written / path.relative_to(tmp_path)).read_bytes(), path


def test_figures_are_whole_images(written: Path) -> None:
    for path in (written / "figures").iterdir():
        if path.suffix == ".svg":
            assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
            assert b"date>" not in path.read_bytes()
        else:
            head = path.read_bytes()[:24]
            width, height = struct.unpack(">II", head[16:24])
            assert head[:8] == b"\x89PNG\r\n\x1a\n"
            assert min(width, height) > 200


def test_tables_hold_the_numbers_in_full(written: Path) -> None:
    settings = {s["id"]: s for s in tiny()["settings"]}
    barriers = rows(written / "tables" / "barriers.csv")
    assert len(barriers) == 4 * 4
    for row in barriers:
        found = settings[row["setting"]]["matchers"][row["matcher"]]
        assert float(row["percent_of_naive"]) == found["percent_of_naive"]
        assert float(row["percent_of_naive_standard_error"]) == found["percent_standard_error"]
        for key in ("loss_barrier", "accuracy_barrier", "loss_area", "distance"):
            assert (float(row[key]), float(row[f"{key}_standard_error"])) == (found[key]["mean"], found[key]["standard_error"])
        assert row["best"] == str(row["matcher"] == "learned")
        assert row["rope_base"] == ("10000.0" if row["pe"] == "rope" else "")
    assert len(rows(written / "tables" / "pairs.csv")) == 4 * 4 * 3
    models = rows(written / "tables" / "models.csv")
    assert len(models) == 4 * (1 + 3)
    assert {row["accuracy"] for row in models} == {"0.961", "0.96", "0.957", "0.954"}
    ablations = [row for row in rows(written / "tables" / "ablations.csv") if row["ablation"] == "stage_two_orthogonal"]
    assert {row["mean"] for row in ablations if row["quantity"] == "percent of naive"} == {"13.2"}
    assert {row["attention_dimension"] for row in rows(written / "tables" / "symmetry.csv")} == {"2176", "4096"}
    assert rows(written / "tables" / "settings.csv")[0]["data_grid"] == "[4, 4]"
    assert rows(written / "tables" / "failures.csv")[0]["unit"] == "align/s016/learned/0-1"
    typed = json.loads((written / "tables" / "tables.json").read_text())
    assert [row["setting"] for row in typed["barriers"]] == [row["setting"] for row in barriers]
    assert typed["barriers"][0]["percent_of_naive"] == 100.0


def test_summary_has_every_cell(written: Path) -> None:
    text = (written / "summary.md").read_text()
    cells = text[text.index("### digits") : text.index("### Ablations")]
    lines = [line for line in cells.splitlines() if line.startswith(("| none", "| RoPE"))]
    assert "| RoPE | whole | 130 (0 of 1) |" in text
    assert [line.split(" | ")[:2] for line in lines] == [
        ["| none", "first-attention"],
        ["| none", "whole"],
        ["| RoPE", "first-attention"],
        ["| RoPE", "whole"],
    ]
    assert all(line.count("**") == 2 for line in lines)
    assert "| digits · ViT · RoPE · whole | 1.33 ± 0.33 of 24 | 2.7 ± 1.9 | 75.3 | 13.2 | 9.10 |" in text
    assert "| digits | ViT | RoPE | 2 | 64 | 4 | 4 | 98,304 | 2,176 | 4,193 | 4.27 | O(64) × R_{&gt;0} |" in text


def test_findings(tmp_path: Path) -> None:
    document = tiny()
    for setting, left in zip(document["settings"], (90.0, 30.0, 60.0, 20.0), strict=True):
        for name, factor in (("two_stage", 1.0), ("activations", 0.5), ("learned", 0.1)):
            setting["matchers"][name]["percent_of_naive"] = left * factor
        setting["matchers"]["learned"]["accuracy_barrier"]["mean"] = 0.0099 if setting["scope"] == "first-attention" else 0.0101
    study = load(tmp_path, document)
    assert leader(study) == "learned"
    whole = summarise(study, "two_stage", scope="whole")
    assert (whole.settings, whole.median, whole.lowest, whole.highest) == (2, 75.0, 60.0, 90.0)
    (row,) = [row for row in contrasts(study) if row.matcher == "two_stage"]
    assert (row.other, row.settings, row.difference) == ("none", 2, Estimate(20.0, pytest.approx(10.0)))
    text = "\n".join(answer(study))
    assert "learned matching leaves 4.50 % [2.00 to 9.00 %]: median over 4 settings" in text
    assert "two-stage 45.0 % [20.0 to 90.0 %]; activations 22.5 % [10.0 to 45.0 %]" in text
    assert "first-attention 2 of 2 (0 without matching), whole 0 of 2 (0 without matching)" in text
    assert "under two-stage matching RoPE leaves 20 ± 10 percentage points more than no encoding (2 matched settings)" in text


def test_matched_settings_differ_in_the_encoding_alone(tmp_path: Path) -> None:
    document = tiny()
    document["settings"][2]["width"] = 32
    assert {row.settings for row in contrasts(load(tmp_path, document))} == {1}


def test_best_is_naive_when_matching_makes_it_worse(tmp_path: Path) -> None:
    document = tiny()
    for name in ("two_stage", "activations", "learned"):
        document["settings"][0]["matchers"][name]["loss_barrier"]["mean"] = 99.0
    study = load(tmp_path, document)
    assert best(study.settings[0]) == "naive"
    assert best(study.settings[1]) == "learned"


def test_nothing_is_best_without_a_barrier(tmp_path: Path) -> None:
    study = load(tmp_path, fake_study.study())
    assert best(study.settings[-1]) is None
    assert uncertain(study.settings[-1])
    assert not uncertain(study.settings[0])
    assert "| learned | first-layer | width 32 | 1 | 0† | – | – | – |" in markdown(study)


def test_sweeps_change_one_field(tmp_path: Path) -> None:
    found = sweeps(load(tmp_path, fake_study.study()))
    assert [(sweep.field, sweep.values) for sweep in found] == [("width", (32, 64, 128)), ("width", (32, 64, 128)), ("width", (32, 64))]
    assert len({sweep.fixed for sweep in found}) == 3


@pytest.mark.parametrize(
    ("heads", "kv_heads", "expected"),
    [((2, 4), (2, 4), ["heads"]), ((2, 4), (1, 1), ["heads"]), ((2, 2), (1, 2), ["kv_heads"]), ((2, 4), (1, 2), [])],
)
def test_only_full_kv_heads_follow_the_heads(
    tmp_path: Path, heads: tuple[int, int], kv_heads: tuple[int, int], expected: list[str]
) -> None:
    document = tiny()
    few, many = (copy.deepcopy(document["settings"][0]) for _ in range(2))
    few |= {"id": "few", "heads": heads[0], "kv_heads": kv_heads[0]}
    many |= {"id": "many", "heads": heads[1], "kv_heads": kv_heads[1]}
    document["settings"] = [few, many]
    assert [sweep.field for sweep in sweeps(load(tmp_path, document))] == expected


def test_stage_one_that_could_not_be_judged(tmp_path: Path) -> None:
    document = tiny()
    document["settings"][0]["ablations"] |= {"permutation_rank": None, "l_hat": None}
    study = load(tmp_path, document)
    assert "| digits · ViT · RoPE · whole | – | – | 75.3 | 13.2 | 9.10 |" in markdown(study)
    assert "None" not in page(study)


def test_one_pair_and_one_setting(tmp_path: Path) -> None:
    document = tiny()
    document["settings"] = [fake_study.setting(0, "digits", "vit", "rope", "whole", seeds=2)]
    document["failures"] = []
    (tmp_path / "results.json").write_text(json.dumps(document))
    write_report(tmp_path)
    row = rows(tmp_path / "tables" / "barriers.csv")[1]
    assert row["loss_barrier_standard_error"] == ""
    text = (tmp_path / "report.html").read_text()
    assert "Units that failed" not in text
    assert "Sweeps" not in text


def test_a_setting_in_which_everything_failed(tmp_path: Path) -> None:
    document = tiny()
    document["settings"] = document["settings"][:1]
    document["settings"][0] |= {"symmetry": None, "base": None, "models": [], "matchers": {}, "ablations": None}
    (tmp_path / "results.json").write_text(json.dumps(document))
    write_report(tmp_path)
    assert "No barrier left can be given" in (tmp_path / "report.html").read_text()


def test_names_are_text_everywhere(tmp_path: Path) -> None:
    study = load(tmp_path, fake_study.study())
    html, text = page(study), markdown(study)
    for hostile in ("<script>alert", "<b>bold", "<img src=x"):
        assert hostile not in html
    assert html.count("<script") == 2
    assert "<script" not in text
    assert all(line.count(" | ") == line.replace("\\|", "").count(" | ") for line in text.splitlines())


def test_the_page_asks_for_nothing_from_outside(tmp_path: Path) -> None:
    html = page(load(tmp_path, tiny()))
    for word in ('src="', "@import", "url(", '<link rel="style', "fetch("):
        assert word not in html
    assert "default-src 'none'" in html


def test_settings_of_a_cell_are_named_by_what_they_change(tmp_path: Path) -> None:
    document = tiny()
    changes = [{}, {"heads": 2, "kv_heads": 2}, {"rope_base": 100.0}, {"rope_base": 500.5, "freeze": True}, {}]
    document["settings"] = [copy.deepcopy(document["settings"][0]) | change | {"id": f"s{i}"} for i, change in enumerate(changes)]
    document["settings"][4]["scope"] = "first-layer"
    found = details(load(tmp_path, document).settings)
    document["settings"] += [document["settings"][4] | {"id": "twin"}]
    assert details(load(tmp_path, document).settings)["twin"] == "twin"
    assert list(found.values()) == ["RoPE base 10000", "heads 2, RoPE base 10000", "RoPE base 100", "RoPE base 500.5, freeze yes", ""]


def test_file_names_are_safe_and_different() -> None:
    found = slugs(["a/b", "a b", "../..", "…", "A B", "x" * 300])
    assert len(set(found.values())) == 6
    assert all(value.replace("-", "").isalnum() and len(value) < 70 for value in found.values())


@pytest.mark.parametrize(
    ("mean", "error", "text"),
    [
        (55.04, 7.36, "55.0 ± 7.4"),
        (103.6, 14.2, "104 ± 14"),
        (0.0312, 0.00123, "0.0312 ± 0.0012"),
        (2.5, None, "2.50"),
        (None, None, "–"),
        (0.0, 0.0, "0"),
        (0.00002, 0.0000014, "2.00e-05 ± 1.4e-06"),
    ],
)
def test_estimates_are_rounded_where_the_error_begins(mean: float | None, error: float | None, text: str) -> None:
    assert estimate(Estimate(mean, error)) == text


def test_numbers_keep_three_digits() -> None:
    assert [number(x) for x in (None, 0.0, 1234.4, 12.345, 0.012345, 0.0001)] == ["–", "0", "1234", "12.3", "0.0123", "1.00e-04"]


def _drop(*keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *way, last = keys
        for key in way:
            document = document[key]
        del document[last]

    return change


def _put(value: Any, *keys: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        *way, last = keys
        for key in way:
            document = document[key]
        document[last] = value

    return change


NAIVE = ("settings", 1, "matchers", "naive")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_put([], "settings"), "settings: expected at least one setting"),
        (_drop("settings"), "top level: has no 'settings'"),
        (_put("x", "settings"), 'settings: expected a list, got "x"'),
        (_put("s000", "settings", 1, "id"), "expected different ids, got 's000' twice"),
        (_put(4, "settings", 1, "task"), r"settings\[1\]\.task: expected a text, got 4"),
        (_put(None, "settings", 1, "models"), r"settings\[1\]\.models: expected a list, got null"),
        (_put(True, *NAIVE, "loss_barrier", "mean"), r"naive\.loss_barrier\.mean: expected a number, got true"),
        (_drop(*NAIVE, "percent_of_naive"), r"settings\[1\]\.matchers\.naive: has no 'percent_of_naive'"),
        (_put([0.1], *NAIVE, "pairs", 0, "loss"), r"pairs\[0\]\.loss: expected one number at each"),
        (_put([], *NAIVE, "pairs"), "expected at least one pair"),
        (_put([1], *NAIVE, "pairs", 0, "seeds"), "expected two seeds"),
        (_put([1.0], "settings", 0, "models", 0, "training", "loss"), "expected 11 numbers"),
        (_put(float("nan"), "settings", 0, "base", "loss"), "NaN is not a number"),
    ],
)
def test_damaged_results_say_where(tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    document = tiny()
    change(document)
    (tmp_path / "results.json").write_text(json.dumps(document))
    with pytest.raises(CosetError, match=message) as caught:
        write_report(tmp_path)
    assert str(tmp_path / "results.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]"])
def test_what_is_no_results_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "results.json").write_bytes(content)
    with pytest.raises(CosetError, match=r"results\.json"):
        write_report(tmp_path)


def test_no_results_at_all(tmp_path: Path) -> None:
    with pytest.raises(CosetError, match=r"`coset study run CONFIG\.toml -o .*` writes it"):
        write_report(tmp_path)


def test_a_file_that_cannot_be_written_leaves_no_partial_one(tmp_path: Path) -> None:
    document = tiny()
    document["settings"] = document["settings"][:1]
    (tmp_path / "results.json").write_text(json.dumps(document))
    (tmp_path / "report.html").mkdir()
    with pytest.raises(CosetError, match=r"report\.html: cannot be written"):
        write_report(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "results.json"]
