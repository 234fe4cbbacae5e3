"""The page's code works as written, and its recipes are valid."""

import re
from pathlib import Path

import yaml

from trainwright import RunConfig

PAGE = (Path(__file__).parents[2] / "docs/dynamic_data.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.S)


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for code in blocks("python"):
        exec(compile(code, "dynamic_data.md", "exec"), names)
    assert abs(sum(names["shares"].values()) - 1) < 1e-12
    assert names["kept"] == [{"text": "a text of five words"}] and (tmp_path / "pipeline.yaml").is_file()


def test_the_recipes_are_valid():
    found = [RunConfig.from_dict(yaml.safe_load(text)) for text in blocks("yaml")]
    assert [c.data.mixer.name for c in found] == ["doremi", "schedule", "trec", "static"]
    assert found[-1].data.selector.name == "loss"
