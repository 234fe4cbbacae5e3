"""Early exits of a decoder: losses, weights over steps, roles and counts, export, and the two ways to decode."""

from __future__ import annotations

import copy
import json
import logging
import math

import pytest
import torch
from torch.nn import functional as F

from trainwright.core.batch import Batch
from trainwright.core.errors import ConfigError
from trainwright.core.params import named_params
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.models.early_exit import check_objective, exit_weight
from trainwright.models.exit_decoding import ExitDecoding, stage_cuts, teacher_forced
from trainwright.models.generate import generate_ids
from trainwright.models.hf_io import from_pretrained, save_pretrained
from trainwright.models.transforms.early_exit import EarlyExitConfig
from trainwright.objectives.next_token import NextTokenConfig

VOCAB = 37


def decoder(seed=0, **more):
    torch.manual_seed(seed)
    spec = {"dim": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, **more}
    model = DecoderModelConfig(family="llama", **spec).build(VOCAB, 64)
    for p in model.parameters():
        p.data.mul_(2.0)  # layers that matter
    return model


def exits(model=None, after=(1, 3), **settings):
    torch.manual_seed(1)
    return EarlyExitConfig(after=list(after), **settings).apply(decoder() if model is None else model)


def batch(rows=2, length=12):
    g = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCAB, (rows, length + 1), generator=g)
    weights = (torch.rand(rows, length, generator=g) < 0.7).float()
    positions = torch.arange(length).expand(rows, length)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, positions, torch.zeros(rows, length, dtype=torch.int32))


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"tied": False, "mlp": True}, {"norm": False}, {"before": True}])
@pytest.mark.parametrize("tie", [True, False])
def test_loss_is_the_sum_of_weighted_cross_entropies(settings, tie):
    """Against plain torch: layers one by one, whole logits, F.cross_entropy; gradients of all parameters."""
    model = exits(decoder(tie_embeddings=tie), weights=[0.25, 0.5], **settings).double()
    data = batch()
    loss = NextTokenConfig().build()(model, data)
    loss.sum.backward()
    got = {n: p.grad.clone() for n, p in model.named_parameters()}

    model.zero_grad()
    head = model.embed.weight if tie else model.head.weight
    x = model.embed(data.tokens)
    cos, sin = model.rope(data.positions, 12, x.device)
    plan = model.plan_attention(data.doc_ids, 2, 12, 0, x.device)
    stream = [x]
    for block in model.blocks:
        x = block(x, cos, sin, plan)
        stream.append(x)

    def ce(states, weight):
        nll = F.cross_entropy((states @ weight.T).flatten(0, 1), data.targets.flatten(), reduction="none")
        return (nll * data.weights.flatten()).sum()

    total = ce(model.norm(x), head)
    for position, weight in zip((0, 2) if settings.get("before") else (1, 3), (0.25, 0.5), strict=True):
        module, state = model.exits[str(position)], stream[position]
        if module.mlp is not None:
            state = state + module.mlp(module.mlp_norm(state))
        state = state if module.norm is None else module.norm(state)
        nll = ce(state, head if module.head is None else module.head.weight)
        torch.testing.assert_close(loss.metrics[f"exit_{position}_nll"].double(), nll.double(), rtol=1e-12, atol=0)
        total = total + weight * nll
    total.backward()
    torch.testing.assert_close(loss.sum, total, rtol=1e-12, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-10, atol=1e-12, msg=name)


def test_weight_0_leaves_the_model_as_it_is_without_exits():
    plain, data = decoder(), batch()
    model = exits(copy.deepcopy(plain), weights=[0.0, 0.0])
    for m in (plain, model):
        NextTokenConfig().build()(m, data).sum.backward()
    for name, p in plain.named_parameters():
        assert torch.equal(p.grad, model.get_parameter(name).grad), name


def test_weights_over_steps():
    """From init to the weight, linear and along half a cosine; then they stay."""
    assert [exit_weight(t, 0.5, warmup_steps=4) for t in (0, 1, 4, 9)] == [0.0, 0.125, 0.5, 0.5]
    assert exit_weight(0, 0.5) == 0.5
    half = [exit_weight(t, 1.0, init=0.2, warmup_steps=8, shape="cosine") for t in (0, 2, 4, 8)]
    want = [0.2, 0.2 + 0.8 * (1 - math.cos(math.pi / 4)) / 2, 0.6, 1.0]
    assert half == pytest.approx(want, abs=1e-12)
    model = exits(weights=[0.25, 0.5], warmup_steps=10)
    assert model.exits.weights == {1: 0.0, 3: 0.0}
    model.exits.at_step(5)
    assert model.exits.weights == {1: 0.125, 3: 0.25}


def test_roles_and_counts():
    model = exits(tied=False, mlp=True)
    roles = {n.name: n.role for n in named_params(model)}
    assert roles["exits.1.head.weight"] == "head" and roles["exits.3.norm.weight"] == "norm"
    assert roles["exits.3.mlp.down.weight"] == "matrix"
    more = model.flops_per_token(32) - decoder().flops_per_token(32)
    assert more == 2 * 6 * (3 * 32 * 48 + VOCAB * 32)
    assert exits().flops_per_token(32) - decoder().flops_per_token(32) == 2 * 6 * VOCAB * 32


def test_copied_heads_say_what_the_last_layer_says_of_the_same_stream():
    model = exits(decoder(tie_embeddings=False), after=[4], tied=False, init="copy")
    seen = {}
    tokens = batch().tokens
    final = model(tokens, head_fn=lambda h: seen.update(h=h) or h.states @ h.head.weight.T)
    early = seen["h"].exits[0].hidden()
    torch.testing.assert_close(early.states @ early.head.weight.T, final)


def test_frozen_model_trains_its_exits_alone():
    model = exits(freeze=True, mlp=True)
    assert all(n.name.startswith("exits.") for n in named_params(model))
    NextTokenConfig().build()(model, batch()).sum.backward()
    assert model.exits["1"].mlp.up.weight.grad.abs().sum() > 0 and model.embed.weight.grad is None


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"after": [0]}, "names layer 0, and the model has layers 1 to 4"),
        ({"after": [2, 5]}, "names layer 5"),
        ({"after": [1, 3], "weights": [1.0]}, "weights=.*are 1 numbers for 2 exits"),
        ({"after": [1], "freeze": True, "norm": False}, "nothing would be trained"),
    ],
)
def test_exits_that_a_model_does_not_have(settings, says):
    with pytest.raises(ConfigError, match=says):
        EarlyExitConfig(**settings).apply(decoder())


@pytest.mark.parametrize("after", [[], [3, 1], [2, 2]])
def test_layers_out_of_order(after):
    with pytest.raises(ValueError, match="rising order"):
        EarlyExitConfig(after=after)


def test_exits_twice_are_refused():
    with pytest.raises(ConfigError, match="early exits already"):
        exits(exits())


def test_objectives_that_pass_by_the_exits_are_refused():
    with pytest.raises(ConfigError, match=r"objective.*does not reach the model's early exits"):
        check_objective(exits(), lambda model, batch: None)
    check_objective(exits(), NextTokenConfig().build())
    check_objective(decoder(), lambda model, batch: None)


def test_export_says_that_exits_stay_behind(tmp_path, caplog):
    model = exits(decoder(tie_embeddings=True), tied=False)
    with caplog.at_level(logging.WARNING, "trainwright"):
        save_pretrained(model, tmp_path / "out")
    assert "without its early exits" in caplog.text
    assert json.loads((tmp_path / "out" / "config.json").read_text())["trainwright_early_exits"] == {
        "after_layers": [1, 3]
    }
    tokens = batch().tokens
    torch.testing.assert_close(from_pretrained(tmp_path / "out")(tokens), model(tokens))


# -- decoding -------------------------------------------------------------------------------------------------------

PROMPT = [5, 9, 2, 30]


def reference(model, prompt, steps, threshold, cap=None, eos=None):
    """Greedy, without a cache: every layer over the whole text for every token, and the rule of the method."""
    ids, out, left, early = list(prompt), [], [], 0
    for step in range(steps):
        seen = {}
        model(torch.tensor([ids]), head_fn=lambda h, seen=seen: seen.update(h=h))
        hidden, found = seen["h"], None
        if step and (cap is None or early < cap):
            for e in hidden.exits:
                h = e.hidden()
                logits = (h.states[:, -1] @ h.head.weight.T).softmax(-1)
                if found is None and logits.max() >= threshold:
                    found = (e.position, int(logits.argmax()))
        early = early + 1 if found else 0
        if found is None:
            found = (model.arch.n_layers, int((hidden.states[:, -1] @ hidden.head.weight.T).argmax()))
        left.append(found[0])
        if found[1] == eos:
            break
        out.append(found[1])
        ids.append(found[1])
    return out, left


def confident_model(**more):
    """Of which tokens leave at each exit and at none, at a threshold of 0.3, and which does not repeat itself."""
    model = exits(decoder(seed=3, tie_embeddings=False, **more))
    with torch.no_grad():
        model.head.weight.mul_(7.0)
        for block in model.blocks:
            block.attn.o.weight.mul_(6.0)
            block.mlp.down.weight.mul_(6.0)
    return model.eval()


def tally(left):
    return {p: left.count(p) for p in left}


@pytest.mark.parametrize("method", ["recompute", "pipelined"])
@pytest.mark.parametrize("family", ["llama", "mixtral", "mistral"])
@torch.no_grad()
def test_threshold_above_1_is_the_plain_model(method, family):
    more = {"llama": {}, "mixtral": {"n_experts": 4, "moe_ffn_dim": 32}, "mistral": {"sliding_window": 5}}[family]
    torch.manual_seed(0)
    spec = {"dim": 32, "n_layers": 4, "n_heads": 2, "n_kv_heads": 1, "ffn_dim": 48, **more}
    plain = DecoderModelConfig(family=family, **spec).build(VOCAB, 64)
    model = exits(copy.deepcopy(plain))
    for settings in ({"temperature": 0}, {"temperature": 0.9, "top_k": 7, "seed": 4}):
        want = generate_ids(plain, [PROMPT], max_new_tokens=24, **settings)
        got = generate_ids(model, [PROMPT], max_new_tokens=24, early_exit=ExitDecoding(1.01, method), **settings)
        assert got == want
    assert len(set(want[0])) > 3


@pytest.mark.parametrize("method, cap", [("recompute", 3), ("recompute", 50), ("pipelined", None)])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@torch.no_grad()
def test_tokens_that_leave_leave_no_hole_in_the_cache(method, cap, family):
    """As without a cache, where every layer sees every token; some leave at each exit and some do not."""
    model = confident_model(**({"sliding_window": 6} if family == "mistral" else {})).double()
    threshold = 0.3
    want, left = reference(model, PROMPT, 40, threshold, cap)
    assert len(set(left)) == 3 and len(set(want)) > 3  # else this shows nothing
    spec = ExitDecoding(threshold, method, **({"cap": cap} if cap else {}))
    got = generate_ids(model, [PROMPT], max_new_tokens=40, temperature=0, early_exit=spec)
    assert got == [want]
    assert spec.stats.left_at == tally(left)
    assert spec.stats.depth == sum(left[1:]) and spec.stats.passes == 39


@torch.no_grad()
def test_forced_passes_bound_what_rides_along():
    """Everything leaves at layer 1: with a cap of 2 each third pass is whole, three tokens wide."""
    model = exits(after=[1]).eval()
    spec = ExitDecoding(1e-9, "recompute", cap=2)
    generate_ids(model, [PROMPT], max_new_tokens=10, temperature=0, early_exit=spec)
    assert spec.stats.left_at == {4: 1 + 3, 1: 6}
    assert spec.stats.layers == 3 * (1 * 1 + 1 * 2 + 4 * 3)
    piped = ExitDecoding(1e-9, "pipelined")
    generate_ids(model, [PROMPT], max_new_tokens=10, temperature=0, early_exit=piped)
    assert piped.stats.left_at == {4: 1, 1: 9} and piped.stats.layers == 9 * 4 and piped.stats.depth == 9


@pytest.mark.parametrize("stages", [None, 1, 2, 4])
@torch.no_grad()
def test_stages_do_not_change_the_tokens(stages):
    model = confident_model()
    want = generate_ids(model, [PROMPT], max_new_tokens=20, temperature=0, early_exit=ExitDecoding(0.3, "pipelined"))
    spec = ExitDecoding(0.3, "pipelined", stages=stages)
    assert generate_ids(model, [PROMPT], max_new_tokens=20, temperature=0, early_exit=spec) == want
    assert stage_cuts(model) == [0, 1, 3, 4] and stage_cuts(model, 2) == [0, 2, 4]


@pytest.mark.parametrize("method", ["recompute", "pipelined"])
@torch.no_grad()
def test_stop_tokens_end_both(method):
    """An end token chosen at an exit, one chosen by the last layer, and a caller's own stop."""
    model = confident_model(sliding_window=6)
    want, left = reference(model, PROMPT, 40, 0.3)
    for wanted in (True, False):
        at = next(i for i, t in enumerate(want) if i and (left[i] < 4) == wanted and t not in want[:i])
        spec = ExitDecoding(0.3, method, cap=99)
        got = generate_ids(model, [PROMPT], max_new_tokens=40, temperature=0, eos_id=want[at], early_exit=spec)
        assert got == [want[:at]] and spec.stats.tokens == at + 1
    spec = ExitDecoding(0.3, method, cap=99)
    got = generate_ids(
        model, [PROMPT], max_new_tokens=40, temperature=0, early_exit=spec, stopped=lambda row, ids: len(ids) == 5
    )
    assert got == [want[:5]] and spec.stats.tokens == 5


@pytest.mark.parametrize(
    "spec, more, says",
    [
        ({}, {"prompts": [PROMPT, PROMPT]}, "prompts=2: should be 1 where exits are taken"),
        ({}, {"use_cache": False}, "use_cache=False"),
        ({}, {"free_prompts": [[1]], "guidance": 1.5}, "guidance"),
        ({"threshold": 0.0}, {}, "exit_threshold=0.0: should be above 0"),
        ({"method": "skip"}, {}, "exit_method='skip': should be recompute or pipelined"),
        ({"cap": 0}, {}, "exit_cap=0: should be 1 or more"),
        ({"stages": 5}, {}, "exit_stages=5: should be between 1 and the 4 layers"),
    ],
)
def test_exits_that_cannot_be_taken(spec, more, says):
    model = exits()
    with pytest.raises(ConfigError, match=says):
        generate_ids(model, **{"prompts": [PROMPT], **more}, early_exit=ExitDecoding(**{"threshold": 0.5, **spec}))


def test_a_model_without_exits_is_refused():
    with pytest.raises(ConfigError, match="needs a model with early exits"):
        generate_ids(decoder(), [PROMPT], early_exit=ExitDecoding(0.5))


@torch.no_grad()
def test_a_stage_that_fails_says_so():
    model = exits().eval()
    spec = ExitDecoding(0.3, "pipelined")
    model.blocks[2].forward = lambda *a: 1 / 0
    with pytest.raises(ZeroDivisionError):
        generate_ids(model, [PROMPT], max_new_tokens=5, early_exit=spec)


@torch.no_grad()
def test_teacher_forced_counts():
    model = confident_model()
    tokens = torch.randint(VOCAB, (3, 20), generator=torch.Generator().manual_seed(0))
    got = teacher_forced(model, tokens, 0.3)
    seen = {}
    final = model(tokens, head_fn=lambda h: seen.update(h=h) or h.states @ h.head.weight.T).argmax(-1)
    left = agree = 0
    skipped = 0.0
    for i in range(3):
        for t in range(20):
            for e in seen["h"].exits:
                h = e.hidden()
                p = (h.states[i, t] @ h.head.weight.T).softmax(-1)
                if p.max() >= 0.3:
                    left += 1
                    agree += int(p.argmax() == final[i, t])
                    skipped += 1 - e.position / 4
                    break
    assert (got.tokens, got.left, got.agree) == (60, left, agree) and 0 < left < 60
    assert got.skipped == pytest.approx(skipped / 60)
