"""The study as flat tables: CSV for programs, JSON for the same with types, Markdown for documents."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from coset.study.report.analysis import CONNECTED, answer, best, contrasts, encodings, scopes, summaries, summarise, uncertain
from coset.study.report.names import details, estimate, label, number, ordered, title
from coset.study.report.results import Estimate, Scalar, Setting, Study

Row = Mapping[str, Scalar]


def tables(study: Study) -> dict[str, list[Row]]:
    """Every table by name; rows of one table have equal keys."""
    fields = tuple(dict.fromkeys(key for setting in study.settings for key in setting.fields))

    data = tuple(dict.fromkeys(key for setting in study.settings for key in setting.data))

    def described(setting: Setting) -> dict[str, Scalar]:
        return {"setting": setting.id, **{key: setting.fields.get(key) for key in fields}}

    return {
        "answer": [asdict(row) for row in summaries(study)],
        "encodings": [
            {"other": row.other, "matcher": row.matcher, "settings": row.settings, **_columns("difference", row.difference)}
            for row in contrasts(study)
        ],
        "settings": [
            {
                **described(setting),
                "parameters": setting.parameters,
                **{f"data_{key}": _scalar(setting.data.get(key)) for key in data},
                "base_loss": None if setting.base is None else setting.base[0],
                "base_accuracy": None if setting.base is None else setting.base[1],
            }
            for setting in study.settings
        ],
        "barriers": [
            {
                **described(setting),
                "matcher": name,
                "pairs": len(matching.pairs),
                **_columns("percent_of_naive", matching.percent),
                **_columns("loss_barrier", matching.loss_barrier),
                **_columns("accuracy_barrier", matching.accuracy_barrier),
                **_columns("loss_area", matching.loss_area),
                **_columns("distance", matching.distance),
                "best": name == best(setting),
            }
            for setting in study.settings
            for name, matching in setting.matchers.items()
        ],
        "pairs": [
            {
                "setting": setting.id,
                "matcher": name,
                "seed_a": pair.seeds[0],
                "seed_b": pair.seeds[1],
                "loss_barrier": pair.loss_barrier,
                "accuracy_barrier": pair.accuracy_barrier,
                "loss_area": pair.loss_area,
                "distance": pair.distance,
            }
            for setting in study.settings
            for name, matching in setting.matchers.items()
            for pair in matching.pairs
        ],
        "models": [
            {**described(setting), "model_kind": kind, "seed": seed, "loss": loss, "accuracy": accuracy, "final_training_loss": final}
            for setting in study.settings
            for kind, seed, loss, accuracy, final in _models(setting)
        ],
        "symmetry": [
            {
                **described(setting),
                "parameters": setting.parameters,
                "attention_dimension": setting.symmetry.attention,
                "total_dimension": setting.symmetry.total,
                "stream_group": setting.symmetry.stream_group,
                "stream_dimension": setting.symmetry.stream_dimension,
                "percent_of_parameters": 100.0 * setting.symmetry.total / setting.parameters,
            }
            for setting in study.settings
            if setting.symmetry is not None
        ],
        "ablations": [row for setting in study.settings for row in _ablations(setting, described(setting))],
        "failures": [asdict(failure) for failure in study.failures],
    }


def _scalar(value: object) -> Scalar:
    return value if value is None or isinstance(value, str | int | float | bool) else json.dumps(value)


def _columns(name: str, value: Estimate) -> dict[str, Scalar]:
    return {name: value.mean, f"{name}_standard_error": value.error}


def _models(setting: Setting) -> list[tuple[str, int | None, float, float, float | None]]:
    base = [("base", None, *setting.base, None)] if setting.base is not None else []
    return [*base, *(("retrained", m.seed, m.loss, m.accuracy, m.training[-1] if m.training else None) for m in setting.models)]


def _ablations(setting: Setting, described: dict[str, Scalar]) -> list[Row]:
    found = setting.ablations
    if found is None:
        return []
    unit = {"permutation_rank": ("rank of the permutation", found.of, found.rank), "l_hat": ("L-hat", None, found.l_hat)}
    rows: list[Row] = [
        {**described, "ablation": key, "quantity": quantity, "mean": value.mean, "standard_error": value.error, "of": of}
        for key, (quantity, of, value) in unit.items()
    ]
    for name, stage in found.stage_two.items():
        for quantity, value in (("loss barrier", stage.loss_barrier), ("percent of naive", stage.percent)):
            row = {"ablation": f"stage_two_{name}", "quantity": quantity, "mean": value.mean, "standard_error": value.error, "of": None}
            rows.append({**described, **row})
    return rows


def as_csv(rows: Sequence[Row]) -> bytes:
    """UTF-8, numbers in full precision, an empty field for what does not exist; no row at all gives an empty file."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue().encode()


def as_json(found: Mapping[str, Sequence[Row]]) -> bytes:
    """All tables in one document."""
    return (json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def markdown(study: Study) -> str:
    """The tables that a document includes as they are: barriers left, ablations, dimensions."""
    told = details(study.settings)
    parts = [*(f"- {_plain(sentence)}" for sentence in answer(study)), "", f"Barrier: {_plain(study.definition)}.", ""]
    parts += ["### All tasks: median by encoding and scope", "", *_median_lines(study), ""]
    groups: dict[tuple[str, ...], list[Setting]] = {}
    for setting in study.settings:
        groups.setdefault(setting.cell[:2], []).append(setting)
    for (task, model), group in groups.items():
        parts += [f"### {_plain(title(task))}, {_plain(title(model))}", "", *_left(study, group, told), ""]
    if any(setting.ablations for setting in study.settings):
        parts += ["### Ablations", "", *_ablation_lines(study, told), ""]
    if any(setting.symmetry for setting in study.settings):
        parts += ["### Dimensions of the symmetry groups", "", *_dimension_lines(study), ""]
    return "\n".join(parts)


def in_order(settings: Sequence[Setting]) -> list[Setting]:
    """By encoding, then scope from small to whole; the order of the study otherwise."""
    pes, scopes = (ordered((str(setting.fields[key]) for setting in settings), key) for key in ("pe", "scope"))
    return sorted(settings, key=lambda setting: (pes.index(str(setting.fields["pe"])), scopes.index(str(setting.fields["scope"]))))


def _left(study: Study, group: Sequence[Setting], told: Mapping[str, str]) -> list[str]:
    others = [name for name in study.matchers if name != "naive" and any(name in setting.matchers for setting in group)]
    detailed = any(told[setting.id] for setting in group)
    head = ["encoding", "scope", *(["variant"] if detailed else []), "pairs", "naive barrier (nats)", *(f"{title(n)} (%)" for n in others)]
    rows = []
    for setting in in_order(group):
        naive = setting.matchers.get("naive")
        cells = [title(setting.fields["pe"]), title(setting.fields["scope"]), *([told[setting.id]] if detailed else [])]
        cells += ["–", "–"] if naive is None else [str(len(naive.pairs)), estimate(naive.loss_barrier) + "†" * uncertain(setting)]
        for name in others:
            matching = setting.matchers.get(name)
            text = "–" if matching is None else estimate(matching.percent)
            cells.append(f"**{text}**" if name == best(setting) else text)
        rows.append(cells)
    note = "Loss barrier left in % of naive, mean ± standard error over pairs of seeds; the lowest of a row in bold."
    doubt = " † The naive barrier is within two standard errors of 0: its ratios say little."
    return [*_table(head, rows), "", note + doubt * any(uncertain(setting) for setting in group)]


def _median_lines(study: Study) -> list[str]:
    others = [name for name in study.matchers if name != "naive"]
    rows = []
    for pe, scope in [(pe, scope) for pe in encodings(study) for scope in scopes(study)]:
        found = [summarise(study, name, pe, scope) for name in others]
        if any(summary.settings for summary in found):
            rows.append([title(pe), title(scope), *(f"{number(s.median)} ({s.connected} of {s.settings})" for s in found)])
    percent = f"{100 * CONNECTED:.0f} percentage point"
    note = f"Loss barrier left in % of naive, median over settings; in parentheses in how many of them the accuracy barrier is at most {percent}."
    return [*_table(["encoding", "scope", *(f"{title(name)} (%)" for name in others)], rows), "", note]


def _ablation_lines(study: Study, told: Mapping[str, str]) -> list[str]:
    head = ["setting", "rank of stage 1's permutation", "L̂", *(f"stage 2 {name} (%)" for name in ("none", "orthogonal", "full"))]
    rows = [
        [
            label(setting, told[setting.id]),
            estimate(setting.ablations.rank) + (f" of {setting.ablations.of}" if setting.ablations.of else ""),
            estimate(setting.ablations.l_hat),
            *(estimate(stage.percent) for stage in setting.ablations.stage_two.values()),
        ]
        for setting in study.settings
        if setting.ablations is not None
    ]
    return _table(head, rows)


def architectures(study: Study) -> list[Setting]:
    """One setting for each group of settings that share encoding, sizes and group."""
    found: dict[object, Setting] = {}
    for setting in study.settings:
        if setting.symmetry is not None:
            keys = ("task", "model", "pe", "layers", "width", "heads", "kv_heads", "rope_base")
            found.setdefault((*(setting.fields.get(key) for key in keys), setting.symmetry, setting.parameters), setting)
    return list(found.values())


def _dimension_lines(study: Study) -> list[str]:
    head = [
        "task",
        "model",
        "encoding",
        "layers",
        "width",
        "heads",
        "KV heads",
        "parameters",
        "attention",
        "total",
        "% of parameters",
        "stream",
    ]
    rows = []
    for setting in architectures(study):
        if setting.symmetry is not None:
            sizes = [title(setting.fields.get(key)) for key in ("task", "model", "pe", "layers", "width", "heads", "kv_heads")]
            found = [setting.symmetry.attention, setting.symmetry.total]
            share = number(100.0 * setting.symmetry.total / setting.parameters)
            rows.append([*sizes, f"{setting.parameters:,}", *(f"{n:,}" for n in found), share, setting.symmetry.stream_group])
    return _table(head, rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(_plain(cell) if cell != "---" else cell for cell in line) + " |" for line in lines]


def _plain(text: str) -> str:
    # Names come from a configuration: neither HTML nor a column of their own. Bold marks are ours.
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return " ".join(escaped.replace("|", "\\|").split())
