"""The pages on corpora and tokenizers run as written, from top to bottom, in one folder."""

import re
import shlex
from pathlib import Path

import pytest

from trainwright.cli import run

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
@pytest.mark.parametrize("page", ["data.md", "tokenizers.md"])
def test_page_runs_as_written(page, tmp_path, monkeypatch, capsys):
    if page == "data.md":
        pytest.importorskip("license_expression")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINWRIGHT_CACHE", str(tmp_path / "cache"))
    commands = 0
    for language, block in re.findall(r"```(bash|python)\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S):
        if language == "python":
            exec(compile(block, page, "exec"), {})
            continue
        for line in block.replace("\\\n", " ").strip().splitlines():
            name, *arguments = shlex.split(line)
            assert name == "trainwright"
            assert run(arguments) == 0, (line, capsys.readouterr().err)
            commands += 1
    assert commands >= 4
