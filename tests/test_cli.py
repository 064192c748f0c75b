"""The command line: its contract with scripts (flags, JSON keys, exit codes, streams), and errors on one line."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from coset.architecture import uniform
from coset.cli import app as application
from coset.cli.app import app, run
from coset.cli.options import ArchitectureFlags
from coset.cli.symmetry import layers_label, spaces
from coset.errors import CosetError
from coset.study import demo as study
from coset.symmetries import symmetry


def words(flags: str) -> list[str]:
    return shlex.split(flags)


def run_json(capsys: pytest.CaptureFixture[str], flags: str) -> Any:
    assert run([*words(flags), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


SCRIPT = str(Path(sys.executable).with_name("coset"))


# --- symmetry ---------------------------------------------------------------------------------------------------------

LLAMA = "symmetry --pe rope --heads 4 --kv-heads 2 --head-dim 8 --width 32 --layers 2 --norm rms --mlp swiglu --bias none"


def test_symmetry_json_keeps_its_contract(capsys: pytest.CaptureFixture[str]) -> None:
    account = run_json(capsys, LLAMA)
    assert account.keys() >= {"layers", "stream", "shifts", "attention_dimension", "total_dimension", "parameters", "headline"}
    assert len(account["layers"]) == 2
    for layer in account["layers"]:
        assert layer["heads"] == {"group": "S_2 ≀ S_2", "order": 8}
        assert (layer["qk"]["group"], layer["qk"]["copies"], layer["qk"]["dimension"]) == ("(C^×)^4", 2, 16)
        assert (layer["vo"]["group"], layer["vo"]["copies"], layer["vo"]["dimension"]) == ("GL(8)", 2, 128)
        assert layer["shifts"] == {"dimension": 0, "which": []}
        assert layer["neurons"]["dimension"] == 128
        assert layer["gains"]["dimension"] == 64
    assert account["stream"]["dimension"] == 32 * 31 // 2 + 1
    assert account["attention_dimension"] == 2 * (16 + 128)
    assert account["total_dimension"] == 2 * (16 + 128 + 128 + 64) + 497 + 32


@pytest.mark.parametrize(
    ("flags", "total"),
    [
        ("--pe none", 98),
        ("--pe rope", 74),
        ("--pe rope --mlp swiglu", 79),
        ("--pe rope --mlp swiglu --layers 2 --kv-heads 1", 96),
        ("--pe rope --tied", 53),
        ("--pe none --mlp relu", 103),
        ("--pe t5", 100),
        ("--pe learned --positions 7", 104),
        ("--pe rope --mlp swiglu --qk-norm", 77),
        ("--pe none --norm none", 100),
        ("--pe rope --norm none --rope-pairing interleaved --rope-base 50", 76),
    ],
)
def test_totals_that_the_jacobian_was_seen_to_have(capsys: pytest.CaptureFixture[str], flags: str, total: int) -> None:
    sizes = "--width 6 --heads 2 --head-dim 4 --mlp-width 5 --vocab 13"
    layers = "" if "--layers" in flags else "--layers 1"
    assert run_json(capsys, f"symmetry {sizes} {layers} {flags}")["total_dimension"] == total


def test_flags_are_those_of_the_contract() -> None:
    contract = (
        "--pe --layers --width --heads --kv-heads --head-dim --rotary-dim --rope-base --rope-pairing --norm --post-norm --mlp --mlp-width "
        "--bias --qk-norm --tied --vocab --positions --outputs --json --quiet --debug"
    )
    known = app["symmetry"].assemble_argument_collection()
    assert set(words(contract)) <= {name for argument in known for name in argument.names}


def test_defaults_of_flags_are_those_of_the_library() -> None:
    assert ArchitectureFlags().architecture() == uniform()


def test_every_flag_reaches_the_architecture() -> None:
    other = ArchitectureFlags(
        pe="rope", layers=3, width=60, heads=6, kv_heads=3, head_dim=14, rotary_dim=10, rope_base=50.0, rope_pairing="interleaved",
        norm="layer", post_norm=True, mlp="geglu", mlp_width=7, bias="all", qk_norm=True, tied=True, vocab=11,
        outputs="probabilities",
    )  # fmt: skip
    command = ["symmetry"]
    given = {name: value for name, value in asdict(other).items() if name != "positions"}
    for name, value in given.items():
        if name != "pe":
            assert value != getattr(ArchitectureFlags(), name)
        flag = f"--{name.replace('_', '-')}"
        command += [flag] if value is True else [flag, str(value)]
    _, bound, _ = app.parse_args(command, exit_on_error=False, print_error=False)
    assert bound.arguments["flags"] == other
    assert other.architecture() == uniform(**given)
    table = ArchitectureFlags(pe="learned", positions=9)
    assert table.architecture() == uniform(pe="learned", positions=9)


def test_large_architectures_are_counted_in_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    account = run_json(capsys, "symmetry --layers 2000 --heads 1024 --width 8192 --mlp-width 4000000000 --vocab 4000000000")
    assert len(account["layers"]) == 2000


def test_waiting_threads_sleep() -> None:
    """Else a busy machine spends its time in their waiting loops. The environment of the caller goes first."""
    script = "import os, sys; import coset.cli; print(os.environ['OMP_WAIT_POLICY'], 'torch' in sys.modules)"
    for given, expected in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"} | given
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [expected, "False"]


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_and_says_everything(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    assert run(words("symmetry --layers 32 --width 4096 --heads 32 --kv-heads 8 --norm layer --bias all --mlp swiglu")) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= width
    for text in ("layers 0-31", "S_4 ≀ S_8", "((C^×)^64)^8", "heads", "qk", "vo", "neurons", "stream", "attention", "MLP", "norms"):
        assert text in out
    assert "RoPE shrinks the query-key group of plain attention" in out


def test_dimensions_shown_add_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    flags = "symmetry --layers 3 --width 60 --heads 6 --kv-heads 3 --norm layer --bias all --mlp relu --outputs probabilities"
    total = run_json(capsys, flags)["total_dimension"]
    assert run(words(flags)) == 0
    table, totals = capsys.readouterr().out.split("totals")
    rows = [line for line in table.splitlines() if line.startswith("   ")]
    shown = [int(re.findall(r"  ([\d,]+)  ", line)[-1].replace(",", "")) for line in rows if line.strip()]
    assert sum(shown) == total
    assert f"{total:,}" in totals


def test_layers_that_differ_have_lines_of_their_own() -> None:
    rotary, plain = uniform(pe="rope").layers[0], uniform(pe="none").layers[0]
    mixed = replace(uniform(), layers=(rotary, plain, rotary, rotary, rotary))
    sections = [str(cell) for cell in spaces(symmetry(mixed)).columns[0].cells]
    assert "layers 0, 2-4" in sections
    assert "layer 1" in sections


@pytest.mark.parametrize(("indices", "label"), [([3], "layer 3"), ([0, 1, 2], "layers 0-2"), ([0, 1, 4, 6, 7], "layers 0-1, 4, 6-7")])
def test_layers_label(indices: list[int], label: str) -> None:
    assert layers_label(indices) == label


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("symmetry --frob 1", "Unknown option: --frob"),
        ("symmetry --heads x", '--heads: unable to convert "x" into int'),
        ("symmetry --vocab 1e3", "--vocab"),
        ("symmetry --heads", "--heads requires an argument"),
        ("symmetry --pe foo", 'Invalid value "foo" for --pe'),
        ("symmetry --heads 5", "width 64 is not a multiple of 5 heads; give --head-dim"),
        ("symmetry --heads 6 --kv-heads 4 --width 60", "6 heads are not a multiple of 4 KV heads"),
        ("symmetry --rotary-dim 3", "positive even number of lanes, got 3"),
        ("symmetry --layers 0", "--layers: expected an integer from 1 to 4294967295, got 0"),
        ("symmetry --kv-heads -1", "--kv-heads: expected an integer from 1"),
        ("symmetry --kv-heads 1.5", "--kv-heads: expected an integer, got 1.5"),
        ("demo --seeds=2.5", "--seeds: expected an integer, got 2.5"),
        ("certify --pe learned --positions 0", "--positions: expected an integer from 1"),
        ("symmetry --pe sinusoidal --positions 4000000000", "--positions: a fixed table holds at most 16,777,216 numbers here"),
        ("symmetry --rope-base nan", "--rope-base: expected a finite number, got nan"),
        ("symmetry --rope-base -3", "rotary base: expected a positive number, got -3.0"),
        ("demo --seeds 1", "--seeds: expected an integer from 2 to 1000, got 1"),
        ("demo --workers 0", "--workers: expected an integer from 1 to 1024, got 0"),
        ("compare a b --length 0", "--length: expected an integer from 1"),
        ("align a b -o c --matcher learned --steps -2", "--steps: expected an integer from 1"),
        (
            "symmetry somewhere --layers 3 --pe alibi",
            "--pe, --layers: a checkpoint fixes the architecture, and somewhere is taken as one; give the folder or flags",
        ),
        ("symmetry somewhere --outputs probabilities", "describe the model by flags (coset inspect shows its sizes)"),
        ("certify somewhere --outputs probabilities", "--outputs: a checkpoint fixes the architecture, and somewhere is taken as one"),
        ("certify --family gpt2 --tied", "--family gpt2: a family fixes the architecture, so --tied cannot go with it"),
        ("certify somewhere --family gpt2", "so somewhere cannot go with it; leave one of them out"),
        ("symmetry a b", "b"),
        ("symmetry --layers 100000000", "--layers: expected at most 2,000, got 100,000,000"),
        ("certify --heads 4000000 --width 8000000", "--heads: expected at most 1,024, got 4,000,000"),
        ("symmetry --width 4000000000", "--width: 4 heads would be wider than 8,192 lanes"),
        ("symmetry --width 18446744073709551616", "--width: expected an integer from 1 to 4294967295, got 18446744073709551616"),
        (f"symmetry --vocab {10**30}", "--vocab: expected an integer from"),
        ("certify --seed -1", "--seed: expected an integer from 0 to 4294967295, got -1"),
        (f"certify --seed {2**64}", "--seed: expected an integer from 0 to 4294967295"),
        (f"demo --seeds {10**30}", "--seeds: expected an integer from"),
        (f"scramble a -o b --seed {10**30}", "--seed: expected an integer from 0"),
        ("symmetry --pe none --rope-base 100", "--rope-base: it has no meaning with --pe none"),
        ("symmetry --pe alibi --rope-pairing half", "--rope-pairing: it has no meaning with --pe alibi"),
        ("symmetry --pe learned --rotary-dim 4", "--rotary-dim: it has no meaning with --pe learned"),
        ("symmetry --positions 9", "--positions: it has no meaning with --pe rope; leave it out, or use --pe sinusoidal or learned"),
        ("certify --pe t5 --positions 9", "--positions: it has no meaning with --pe t5"),
        ("align a b -o ''", "-o: expected a value, got nothing"),
        ("align a b --output=", "--output: expected a value, got nothing"),
        ("align a '' -o c", "arguments: expected a value, got nothing"),
        ("frobnicate", 'Unknown command "frobnicate"'),
        ("--frob", "--frob"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str], command: str, message: str) -> None:
    assert run(words(command)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("coset: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(self: ArchitectureFlags) -> None:
        raise error

    monkeypatch.setattr(ArchitectureFlags, "architecture", fail)


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (CosetError("2 tensors differ\n  a: 1\n  b: 2"), ["coset: error: 2 tensors differ", "  a: 1", "  b: 2"]),
        (FileNotFoundError(2, "No such file or directory", "x.txt"), ["coset: error: x.txt: No such file or directory"]),
        (OSError("odd"), ["coset: error: unexpected OSError: odd; --debug shows where"]),
        (RuntimeError("a bug"), ["coset: error: unexpected RuntimeError: a bug; --debug shows where"]),
    ],
)
def test_errors_show_no_traceback_unless_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: Exception, lines: list[str]
) -> None:
    failing(monkeypatch, error)
    assert run(["symmetry"]) == 2
    assert capsys.readouterr().err.splitlines() == lines
    assert run(["symmetry", "--debug"]) == 2
    err = capsys.readouterr().err.splitlines()
    assert err[: len(lines)] == lines
    assert err[len(lines)] == "Traceback (most recent call last):"


def test_interruption_is_one_line_and_exit_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert run(["symmetry"]) == 130
    assert capsys.readouterr().err == "coset: error: interrupted\n"


@pytest.mark.parametrize(("returned", "code"), [(None, 0), (0, 0), (1, 1), (3, 3)])
def test_a_verb_returns_its_exit_code(monkeypatch: pytest.MonkeyPatch, returned: int | None, code: int) -> None:
    probe = App(name="probe")
    probe.command(lambda: returned, name="verb")
    monkeypatch.setattr(application, "app", probe)
    assert run(["verb"]) == code


def test_warnings_are_one_line_on_standard_error_unless_quiet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(self: ArchitectureFlags) -> Any:
        warnings.warn("nothing to move", UserWarning, stacklevel=1)
        return uniform()

    monkeypatch.setattr(ArchitectureFlags, "architecture", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(["symmetry", "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == "coset: warning: nothing to move\n"
        json.loads(out)
        assert run(["symmetry", "--json", "--quiet"]) == 0
        assert capsys.readouterr().err == ""


# --- the process ------------------------------------------------------------------------------------------------------


def test_help_is_quick_because_it_does_not_import_torch() -> None:
    code = "import sys; from coset.cli.app import run; run(['--help']); run(['symmetry', '--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "symmetry" in done.stdout
    assert "--kv-heads" in done.stdout


def test_version_and_no_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert run([]) == 0
    assert "symmetry" in capsys.readouterr().out
    done = subprocess.run([sys.executable, "-m", "coset", "symmetry", "--heads", "0"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("coset: error: ")


@pytest.mark.parametrize("flags", [(), ("--json",), ("--help",)])
def test_a_reader_that_leaves_is_no_error(flags: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "wb") as closed:
        done = subprocess.run([SCRIPT, "symmetry", *flags], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 141
    assert done.stderr == ""


def test_output_that_is_not_unicode(monkeypatch: pytest.MonkeyPatch) -> None:
    written = {}
    for flags in ((), ("--json",)):
        stream = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream, "ascii"))
        assert run(["symmetry", *flags]) == 0
        written[flags] = stream.getvalue().decode("ascii")
    assert "(C^?)^8" in written[()]
    assert json.loads(written[("--json",)])["layers"][0]["qk"]["group"] == "(C^×)^8"


def test_color_is_only_for_terminals_that_want_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    colored = []
    monkeypatch.setenv("TERM", "xterm-256color")
    for variables in ({}, {"FORCE_COLOR": "1"}):
        with monkeypatch.context() as patch:
            patch.delenv("FORCE_COLOR", raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            assert run(["symmetry"]) == 0
        colored.append("\x1b[" in capsys.readouterr().out)
    assert colored == [False, True]


def test_to_be_terminated_is_to_be_interrupted() -> None:
    code = (
        "import os, signal, time, coset.cli.app as app\n"
        "def verb(words):\n"
        "    try:\n"
        "        os.kill(os.getpid(), signal.SIGTERM); time.sleep(20)\n"
        "    except KeyboardInterrupt:\n"
        "        print('tidied'); return 130\n"
        "app.run = verb; app.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "tidied\n"), done.stderr


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_passes_its_flags_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: dict[str, Any] = {}

    def record(output: Path, **options: Any) -> dict[str, Any]:
        seen.update(options, output=output)
        return {"rows": []}

    monkeypatch.setattr(study, "run", record)
    assert run(["demo", "-o", str(tmp_path / "d"), "--seeds", "4", "--seed", "7", "--overwrite", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"rows": []}
    assert seen == {"output": tmp_path / "d", "seeds": 4, "base_seed": 7, "overwrite": True, "quiet": True, "workers": None}


def test_a_demo_that_cannot_be_written_trains_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(study, "_train_all", None)
    (tmp_path / "file").touch()
    for output, message in (
        (tmp_path / "file/demo", "the folder"),
        (tmp_path / "no/demo", "the folder"),
        (Path("/proc/demo"), "cannot write the demo"),
        (tmp_path / ("n" * 250), "cannot write the demo"),
    ):
        assert run(["demo", "-o", str(output), "--quiet"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith(f"coset: error: {output}: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
