import importlib

import pytest
from pydantic import Field

from trainwright.core import registry
from trainwright.core.errors import ConfigError
from trainwright.core.registry import MethodConfig, Slot, build, get, methods, register


@pytest.fixture
def scratch(monkeypatch):
    """A slot of our own, gone after the test."""
    monkeypatch.setitem(registry.SLOTS, "scratch", ())
    monkeypatch.setitem(registry._methods, "scratch", {})
    return "scratch"


def _two(slot):
    @register(slot, "plain", paper="arXiv:0000.00001", seed_id="X1")
    class Plain(MethodConfig):
        """Plain one.

        More."""

        rank: int = Field(4, ge=1)

    @register(slot, "nested")
    class Nested(MethodConfig):
        """Holds another."""

        inner: MethodConfig = Field(default="plain")

    Nested.model_fields["inner"].metadata.append(Slot(slot))
    Nested.model_rebuild(force=True)
    return Plain, Nested


def test_register_build_and_explain(scratch):
    plain, _ = _two(scratch)
    built = build(scratch, {"name": "plain", "rank": 8})
    assert isinstance(built, plain) and built.rank == 8 and built.name == "plain"
    info = get(scratch, "plain")
    assert (info.paper, info.seed_id, info.summary) == ("arXiv:0000.00001", "X1", "Plain one.")
    assert [m.name for m in methods(scratch)] == ["nested", "plain"]
    assert build(scratch, "plain").rank == 4


def test_nested_slot_and_its_error_key(scratch):
    _two(scratch)
    assert build(scratch, {"name": "nested", "inner": {"name": "plain", "rank": 2}}).inner.rank == 2
    with pytest.raises(ConfigError) as error:
        build(scratch, {"name": "nested", "inner": {"name": "plain", "rank": 0}})
    assert error.value.key == "inner.rank" and error.value.value == 0


@pytest.mark.parametrize(
    "spec, says",
    [
        ({"name": "plane"}, "did you mean 'plain'"),
        ({"name": "plain", "rang": 3}, "did you mean 'rank'"),
        ({"name": "plain", "rank": "x"}, "rank='x'"),
        (7, "expected a name or a mapping"),
        ({"rank": 1}, "name is missing"),
    ],
)
def test_wrong_specs_name_the_way_out(scratch, spec, says):
    _two(scratch)
    with pytest.raises(ConfigError, match=says):
        build(scratch, spec)


def test_same_name_twice_is_refused(scratch):
    _two(scratch)
    with pytest.raises(ValueError, match="registered twice"):

        @register(scratch, "plain")
        class Other(MethodConfig):
            """Another."""


def test_plugins_load_through_entry_points(monkeypatch, scratch):
    import importlib.metadata

    def plugin():
        @register(scratch, "from_plugin")
        class FromPlugin(MethodConfig):
            """Comes from elsewhere."""

    class Point:
        def load(self):
            return plugin

    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [Point()] if group == registry.ENTRY_POINTS else []
    )
    registry._load_plugins.cache_clear()
    registry._loaded.discard(scratch)
    try:
        assert [m.name for m in methods(scratch)] == ["from_plugin"]
    finally:
        registry._load_plugins.cache_clear()


def test_a_method_that_cannot_be_imported_is_named_at_every_lookup(monkeypatch, tmp_path):
    """And not missed by the next one, nor those that are to be imported behind it."""
    package = tmp_path / "methods_of_a_test"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a_broken.py").write_text("raise RuntimeError('half written')\n")
    (package / "behind.py").write_text(
        "from trainwright.core.registry import MethodConfig, register\n"
        "@register('scratch', 'behind')\n"
        "class Behind(MethodConfig):\n"
        "    'Comes behind it.'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry.SLOTS, "scratch", ("methods_of_a_test",))
    monkeypatch.setitem(registry._methods, "scratch", {})
    monkeypatch.setattr(registry, "_loaded", set())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="half written"):
            get("scratch", "behind")
    (package / "a_broken.py").write_text("")
    importlib.invalidate_caches()
    assert get("scratch", "behind").summary == "Comes behind it."


def test_every_method_is_explained():
    """Whatever registers says what it is and what each setting means."""
    for method in methods():
        assert method.summary, f"{method.slot} {method.name} has no docstring"
        for name, info in method.config.model_fields.items():
            if name != "name":
                assert info.description, f"{method.slot} {method.name}.{name} has no description"
