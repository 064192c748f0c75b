"""The README's example runs and shows what it says."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    exec(compile(found[1], str(README), "exec"), {})
    name, moved, recovered = capsys.readouterr().out.splitlines()
    assert "S_3 ⋉ (S_2 × (C^×)^5 × GL(10))^3" in name
    assert float(moved) < 1e-10
    assert float(recovered) < 1e-8


def test_every_linked_file_exists() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
