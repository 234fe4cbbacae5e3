"""What the documentation says works as written."""

import re
from pathlib import Path

import pytest
import yaml

from trainwright import RunConfig, Trainer
from trainwright.config.run_config import parse_yaml

ROOT = Path(__file__).parents[2]


def blocks(path, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / path).read_text(), re.S)


def test_the_recipe_in_the_readme_is_the_one_in_recipes():
    (shown,) = [b for b in blocks("README.md", "yaml") if "sources" in b]
    assert parse_yaml(shown, "README") == parse_yaml((ROOT / "recipes/tiny.yaml").read_text(), "tiny")


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.name)
def test_recipes_are_valid(path):
    config = RunConfig.load(path)
    assert yaml.safe_load(config.to_yaml())["run"]["name"]


def test_the_method_of_the_tutorial_trains_and_resumes(recipe):
    """The page's code, registered under a name of its own, in the whole loop."""
    (code,) = blocks("docs/add_a_method.md", "python")
    namespace = {}
    exec(compile(code, "add_a_method.md", "exec"), namespace)
    settings = {"optimizer": {"name": "adabelief", "lr": 1e-3}, "checkpoint.every": 5}
    rows = []
    data = recipe(**settings, **{"train.steps": 30})
    Trainer(RunConfig.load(data)).fit(on_step=rows.append)
    assert rows[-1]["loss"] < 0.8 * rows[0]["loss"]
    more = recipe(**settings, **{"train.steps": 32})
    again = []
    Trainer(RunConfig.load(more), resume=True).fit(on_step=again.append)
    assert [r["step"] for r in again] == [31, 32]


def test_methods_page_lists_every_method():
    import importlib.util

    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    from trainwright.core.registry import methods

    page = hooks.methods_table()
    for method in methods():
        assert f"### `{method.name}`" in page
