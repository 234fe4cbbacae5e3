"""Guided sampling: between what the model says with a context and without."""

import pytest
import torch

from trainwright.core.errors import ConfigError, InputError
from trainwright.core.registry import build
from trainwright.data.context_tokens import with_context_tokens
from trainwright.data.metadata import MetadataConfig
from trainwright.data.tokenizers.bytes import ByteTokenizer
from trainwright.models.generate import generate, generate_ids, stream
from trainwright.models.guidance import Context, guided_logits

TOKENIZER = with_context_tokens(ByteTokenizer())


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    shape = {"dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 64, "max_seq_len": 96}
    net = build("model", {"name": "decoder", **shape}).build(261, 96)
    with torch.no_grad():
        for p in net.parameters():  # an untrained model says nearly the same of everything
            p.mul_(4)
    return net.eval()


def test_c_the_ends_are_the_models_own_logits():
    free, conditioned = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(1))
    for a, b in ((0.0, free), (1.0, conditioned)):
        torch.testing.assert_close(guided_logits(free, conditioned, a), b, rtol=0, atol=0)
        near = guided_logits(free.double(), conditioned.double(), a + 1e-12)
        torch.testing.assert_close(near.float(), b, rtol=0, atol=1e-6)
    want = (free.double() + 2.5 * (conditioned.double() - free.double())).float()
    torch.testing.assert_close(guided_logits(free, conditioned, 2.5), want, rtol=1e-5, atol=1e-5)


def test_c_it_is_a_ratio_of_probabilities_to_the_power_gamma():
    free, conditioned = torch.randn(2, 1, 9, dtype=torch.float64)
    p, q = free.softmax(-1), conditioned.softmax(-1)
    ratio = p * (q / p) ** 1.7
    torch.testing.assert_close(guided_logits(free, conditioned, 1.7).softmax(-1), ratio / ratio.sum())


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("guidance", [0.0, 0.5, 1.0, 3.0])
def test_c_every_step_follows_the_formula_with_two_caches(model, guidance, use_cache):
    """Prompts of different lengths; the logits of each step from two plain passes over the whole text."""
    pairs = [
        Context(u, guidance).prompts(TOKENIZER, p) for u, p in (("http://a.org/x", "one"), ("b.com", "second one"))
    ]
    given, free = [a for a, _ in pairs], [b for _, b in pairs]
    out = generate_ids(
        model, given, free_prompts=free, guidance=guidance, max_new_tokens=12, temperature=0, use_cache=use_cache
    )
    for prompt, bare, ids in zip(given, free, out, strict=True):
        for step, new in enumerate(ids):
            with torch.no_grad():
                one = model(torch.tensor([[*prompt, *ids[:step]]]))[0, -1]
                two = model(torch.tensor([[*bare, *ids[:step]]]))[0, -1]
            assert new == int((two + guidance * (one - two)).argmax())
    assert len(out[0]) == 12


def test_c_guidance_1_and_0_are_plain_generation(model):
    context = Context("http://a.org/x", 1.0)
    given, free = context.prompts(TOKENIZER, "once")
    for guidance, prompt in ((1.0, given), (0.0, free)):
        plain = generate_ids(model, [prompt], max_new_tokens=20, seed=3)
        guided = generate_ids(model, [given], free_prompts=[free], guidance=guidance, max_new_tokens=20, seed=3)
        assert plain == guided
    texts = [
        generate(model, TOKENIZER, ["once"], context=Context("http://a.org/x", g), max_new_tokens=20, temperature=0)
        for g in (0.0, 1.0, 4.0)
    ]
    assert len({t[0] for t in texts}) > 1, "the context must matter"


def test_streamed_pieces_are_the_text(model):
    context = Context("a.org", 2.0)
    whole = generate(model, TOKENIZER, ["abc"], context=context, max_new_tokens=25, seed=1)[0]
    assert "".join(stream(model, TOKENIZER, "abc", context=context, max_new_tokens=25, seed=1)) == whole


def test_prompts_are_laid_out_as_documents_were():
    given, free = Context("https://me@a.org/x?q=1", 1.5).prompts(TOKENIZER, "t")
    assert given == [259, *b"https://a.org/x", 260, *b"t"] and free == [259, 260, *b"t"]
    bare = Context("a.org", 1.5, MetadataConfig(empty="none", kinds=["domain"], max_tokens=3))
    assert bare.prompts(TOKENIZER, "t") == ([259, *b"a.o", 260, *b"t"], [*b"t"])
    assert bare.prompts(TOKENIZER, "")[1] == [TOKENIZER.eos_id]
    forged, _ = Context("<eoc> a", 1.5, MetadataConfig(kinds=["topic"])).prompts(TOKENIZER, "<boc>")
    assert forged.count(259) == 1 and forged.count(260) == 1


@pytest.mark.parametrize("guidance", [-0.5, float("nan"), float("inf")])
def test_a_guidance_below_0_is_refused(model, guidance):
    with pytest.raises(ConfigError, match="guidance"):
        generate(model, TOKENIZER, ["a"], context=Context("a.org", guidance))
    with pytest.raises(ConfigError, match="guidance"):
        generate_ids(model, [[1]], free_prompts=[[1]], guidance=guidance)


def test_contexts_that_cannot_be_are_refused(model):
    with pytest.raises(ConfigError, match="no special token '<boc>'"):
        Context("a.org").prompts(ByteTokenizer(), "a")
    with pytest.raises(ConfigError, match="holds no text"):
        Context("  ").prompts(TOKENIZER, "a")
    append = MetadataConfig(position="append", loss_on_metadata=True)
    with pytest.raises(ConfigError, match="behind documents"):
        Context("a.org", config=append).prompts(TOKENIZER, "a")
    with pytest.raises(ConfigError, match="leaves no room"):
        generate(model, TOKENIZER, ["x" * 80], context=Context("http://" + "y" * 40 + ".org"))
    with pytest.raises(ConfigError, match="text"):
        next(stream(model, TOKENIZER, [1, 2], context=Context("a.org")))
    with pytest.raises(ConfigError, match="free_prompts"):
        generate_ids(model, [[1]], free_prompts=[[1], [2]])


def test_the_command_reads_how_the_run_was_trained(recipe, tmp_path, capsys):
    import json

    from trainwright import RunConfig, Trainer
    from trainwright.cli.generate import run

    file = tmp_path / "docs.jsonl"
    rows = [{"text": f"{'ab' if i % 2 else 'cd'} text {i} " * 3, "url": f"http://s{i % 2}.org/{i}"} for i in range(60)]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    metadata = {"kinds": ["domain"], "max_tokens": 12, "empty": "none"}
    data = recipe(**{"data.sources": [{"name": "jsonl", "path": str(file)}], "data.metadata": metadata})
    trainer = Trainer(RunConfig.load(data))
    trainer.fit()
    settings = {"max_new_tokens": 5, "temperature": 0.0}
    common = {"prompt": "ab", "chat": False, "system": None}
    run(trainer.config.run_dir, "latest", "cpu", settings, **common, context="http://s1.org/9?x", guidance=2.0)
    said = capsys.readouterr().out
    setting = Context("s1.org", 2.0, MetadataConfig(**metadata))
    want = generate(trainer.model, trainer.tokenizer, ["ab"], context=setting, **settings)[0]
    assert said == f"ab{want}\n"
    with pytest.raises(InputError, match="give --context"):
        run(trainer.config.run_dir, "latest", "cpu", settings, **common, guidance=2.0)
    with pytest.raises(InputError, match="not to --chat"):
        run(trainer.config.run_dir, "latest", "cpu", settings, prompt="a", chat=True, system=None, context="a.org")
