"""Running `coset` as the command line does, and what it must print."""

import json

from coset.cli.app import run


def run_json(capsys, *words):
    """Run words that must succeed quietly, and return the one JSON document that they print."""
    capsys.readouterr()
    assert run([*map(str, words), "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def refused(capsys, folder, *words, lines=1):
    """Run words that must fail: exit code 2, so many lines, and not one file or folder more or less below `folder`. Returns the message."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert run([*map(str, words), "--quiet"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("coset: error: ")
    assert "unexpected" not in err.splitlines()[0]
    if lines is not None:
        assert len(err.splitlines()) == lines, err
    assert sorted(folder.rglob("*")) == before
    return err
