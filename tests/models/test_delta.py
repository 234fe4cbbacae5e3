"""Delta releases: base + delta is the model bit by bit, and nothing else passes for it."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from trainwright.core.errors import ConfigError, ModelError
from trainwright.core.registry import build
from trainwright.models import save_pretrained
from trainwright.models.delta import DELTA, add, apply_delta, make_delta, subtract

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@given(st.sampled_from(TYPES), st.sampled_from(TYPES), st.integers(0, 2**31))
def test_any_bits_come_back(dtype, base_dtype, seed):
    """(c) Every bit pattern, NaN, infinities and -0 included, over any base."""
    g = torch.Generator().manual_seed(seed)
    size = torch.finfo(dtype).bits // 8
    raw = torch.randint(0, 256, (16 * size,), dtype=torch.uint8, generator=g)
    model = raw.view(dtype)
    base = (torch.randn(16, generator=g, dtype=torch.float64) * 10 ** torch.randint(-6, 5, (1,), generator=g)).to(
        base_dtype
    )
    back = add(base, subtract(model, base), dtype)
    assert torch.equal(back.view(torch.uint8), model.contiguous().view(torch.uint8))


def test_a_float_difference_would_not_be_exact():
    base, model = torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1e-3], dtype=torch.bfloat16)
    assert not torch.equal(base + (model - base), model)
    assert torch.equal(add(base, subtract(model, base), model.dtype), model)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("delta")
    for name, seed in (("base", 0), ("other", 1), ("tuned", 0)):
        torch.manual_seed(seed)
        size = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, "max_seq_len": 64}
        model = build("model", {"name": "decoder", **size}).build(61, 32)
        if name == "tuned":
            with torch.no_grad():
                for n, p in model.named_parameters():
                    if "blocks.1" in n:
                        p.add_(torch.randn(p.shape) * 1e-3)
        save_pretrained(model, root / name, dtype=torch.bfloat16, max_shard_size=20_000)
    make_delta(root / "base", root / "tuned", root / "delta")
    return root


def weights(folder):
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def test_base_and_delta_are_the_model(folders, tmp_path):
    """(c) Weights bit by bit, also with other shards, and the small files too."""
    apply_delta(folders / "base", folders / "delta", tmp_path / "out")
    got, want = weights(tmp_path / "out"), weights(folders / "tuned")
    assert got.keys() == want.keys()
    for n in want:
        assert got[n].dtype == want[n].dtype and torch.equal(got[n].view(torch.int16), want[n].view(torch.int16)), n
    assert (tmp_path / "out" / "config.json").read_bytes() == (folders / "tuned" / "config.json").read_bytes()
    assert not (tmp_path / "out" / DELTA).exists()
    # What was not trained is zero in the delta: it tells nothing of the base.
    delta = weights(folders / "delta")
    assert not delta["model.embed_tokens.weight"].any() and delta["model.layers.1.mlp.up_proj.weight"].any()


def test_another_base_is_refused_by_its_hash(folders, tmp_path):
    """(c) Of another model, and of the right one with a single bit turned."""
    with pytest.raises(ModelError, match=r"other is not the base that this delta was made from \(base\)"):
        apply_delta(folders / "other", folders / "delta", tmp_path / "out")
    held = weights(folders / "base")
    one = held["model.norm.weight"].view(torch.int16)
    one[3] ^= 1
    (tmp_path / "near").mkdir()
    save_file({n: t.contiguous() for n, t in held.items()}, tmp_path / "near" / "model.safetensors")
    with pytest.raises(ModelError, match=r"1 of \d+ weights differ, such as model.norm.weight"):
        apply_delta(tmp_path / "near", folders / "delta", tmp_path / "out")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_new_and_reshaped_weights_are_stored_whole(tmp_path):
    for name in ("base", "tuned"):
        (tmp_path / name).mkdir()
    save_file({"a": torch.ones(3), "e": torch.ones(4, 2), "gone": torch.ones(1)}, tmp_path / "base/model.safetensors")
    tuned = {"a": torch.full((3,), 2.0), "e": torch.ones(5, 2), "new": torch.tensor([0.1])}
    save_file(tuned, tmp_path / "tuned/model.safetensors")
    info = make_delta(tmp_path / "base", tmp_path / "tuned", tmp_path / "delta")
    assert [n for n, t in info["tensors"].items() if t["base_hash"] is None] == ["e", "new"]
    apply_delta(tmp_path / "base", tmp_path / "delta", tmp_path / "out")
    got = weights(tmp_path / "out")
    assert got.keys() == tuned.keys() and all(torch.equal(got[n], tuned[n]) for n in tuned)


def test_what_is_refused(folders, tmp_path):
    with pytest.raises(ConfigError, match=r"out.*exists"):
        make_delta(folders / "base", folders / "tuned", folders / "delta")
    with pytest.raises(ModelError, match=r"is no delta: it has no delta.json"):
        apply_delta(folders / "base", folders / "tuned", tmp_path / "out")
    (tmp_path / "stranger").mkdir()
    save_file({"x": torch.ones(2)}, tmp_path / "stranger" / "model.safetensors")
    with pytest.raises(ModelError, match="share no weight"):
        make_delta(folders / "base", tmp_path / "stranger", tmp_path / "d")
    # A delta whose weights were changed.
    import shutil

    shutil.copytree(folders / "delta", tmp_path / "delta")
    (file,) = (tmp_path / "delta").glob("*.safetensors")
    held = load_file(file)
    held["model.norm.weight"][0] += 1
    save_file(held, file)
    with pytest.raises(ModelError, match=r"the weight model.norm.weight is damaged"):
        apply_delta(folders / "base", tmp_path / "delta", tmp_path / "out")
    info = json.loads((tmp_path / "delta" / DELTA).read_text())
    (tmp_path / "delta" / DELTA).write_text(json.dumps({**info, "format": 99}))
    with pytest.raises(ModelError, match="its format is 99"):
        apply_delta(folders / "base", tmp_path / "delta", tmp_path / "out")


def test_the_commands(folders, tmp_path):
    from trainwright.cli.app import app

    run = CliRunner()
    made = run.invoke(app, ["delta", "make", *(str(folders / n) for n in ("base", "tuned")), str(tmp_path / "d")])
    assert made.exit_code == 0 and "weights," in made.output and "unchanged" in made.output
    done = run.invoke(app, ["delta", "apply", str(folders / "base"), str(tmp_path / "d"), str(tmp_path / "out")])
    assert done.exit_code == 0
    assert torch.equal(weights(tmp_path / "out")["model.norm.weight"], weights(folders / "tuned")["model.norm.weight"])
