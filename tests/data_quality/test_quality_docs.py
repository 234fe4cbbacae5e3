"""The page about quality works as written."""

import re
from pathlib import Path

import yaml
from real_text import documents, two_sources

from trainwright.data.build.documents import Document
from trainwright.data.build.stages import make_stages

PAGE = (Path(__file__).parents[2] / "docs/data_quality.md").read_text()


def test_the_examples(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    texts, *_ = two_sources(80)
    rated = [Document(f"text {i} " + "good words " * (i % 5), str(i), "web") for i in range(200)]
    namespace = {
        "good_documents": documents(texts[:40], "prose"),
        "crawl_documents": documents(texts[40:], "code"),
        "sample_of_documents": rated,
        "seed_documents": rated[:3],
        "ask_my_model": lambda prompt: "文" * 300 + f" Score: {prompt.count('good words') % 6}",
    }
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    for code in blocks:
        exec(compile(code, "data_quality.md", "exec"), namespace)
    assert "spearman" in capsys.readouterr().out and (tmp_path / "scorers/edu/config.json").is_file()
    assert namespace["document"].provenance[-1]["seed_id"] == "2"
    (stages,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.S)
    assert [s.name for s in make_stages(yaml.safe_load(stages))] == ["normalize_chinese", "exact_dedup", "near_dedup"]
