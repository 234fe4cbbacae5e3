"""ByteScale's selective offload, layer by layer: what comes back, when, and how much of it is there at once."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace

import pytest
import torch

from trainwright.core.batch import Batch
from trainwright.memory.activation_checkpointing import ActivationCheckpointingConfig
from trainwright.models.decoder_config import DecoderModelConfig
from trainwright.objectives.next_token import NextTokenConfig
from trainwright.parallel.context.bytescale import ByteScale
from trainwright.parallel.sppo.offload import Offload

torch.set_num_threads(1)
LAYERS, VOCAB = 5, 61


@pytest.fixture
def events(monkeypatch):
    """("fetch", layer) as a layer's copies back begin, ("asked", layer) where the backward pass had to do it itself."""
    found = []
    bring, restored, fetch = Offload._bring, Offload.restored, Offload.fetch
    under_way = []

    def layer_of(offload, held):
        return next(i for i, some in enumerate(offload._of_chunk) if any(ref() is held for ref in some))

    def _fetch(offload, chunk):
        under_way.append(chunk)
        fetch(offload, chunk)
        under_way.pop()

    def _bring(offload, held):
        if held.back is None:
            event = ("fetch" if under_way else "asked", layer_of(offload, held))
            if event not in found:
                found.append(event)
        return bring(offload, held)

    def _restored(offload, held, view):
        found.append(("live", live(offload)))
        return restored(offload, held, view)

    monkeypatch.setattr(Offload, "fetch", _fetch)
    monkeypatch.setattr(Offload, "_bring", _bring)
    monkeypatch.setattr(Offload, "restored", _restored)
    return found


def live(offload):
    """Layers of which something was brought back and is not freed."""
    held = [[ref() for ref in some] for some in offload._of_chunk]
    return {i for i, some in enumerate(held) if any(h is not None and h.back is not None for h in some)}


def build(device="cpu", recompute=False, **more):
    torch.manual_seed(0)
    dims = {"dim": 32, "n_layers": LAYERS, "n_heads": 4, "n_kv_heads": 4, "ffn_dim": 48, **more}
    model = DecoderModelConfig(**dims).build(VOCAB, 64).to(device)
    if recompute:
        ActivationCheckpointingConfig().apply(model)
    return model


def batch(device="cpu"):
    """A document of 40 tokens and one of 12, which is packed alone."""
    g = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (1, 53), generator=g)
    ids = torch.repeat_interleave(torch.arange(2), torch.tensor([40, 12]))[None].int()
    positions = torch.cat([torch.arange(40), torch.arange(12)])[None]
    return Batch(tokens[:, :-1], tokens[:, 1:], torch.ones(1, 52), positions, ids)


def step(model, ratio, how="ahead", events=None, device="cpu"):
    """Gradients and the ledger of the long document. ``how``: ahead; whole, as one chunk whose tensors are fetched when
    they are asked for; off."""
    context = ByteScale(None, 30, offload=lambda length: ratio)
    model.plan_attention = context.plan
    for i, block in enumerate(model.blocks):
        block.attn.attend = context.attend
        for p in block.parameters():
            if events is not None:
                p.register_post_accumulate_grad_hook(lambda p, i=i: events.append(("grad", i)))
    objective = NextTokenConfig().build()
    model.zero_grad()
    ledger = None
    for micro in context.micro_batches(batch(), 1):
        micro = micro.to(device)
        seen = model if how == "ahead" else torch.nn.Identity()  # in which it finds no layers
        with contextlib.nullcontext() if how == "off" else context.saving(micro, seen):
            loss = objective(model, micro).sum
        loss.backward()
        if micro.tokens.numel() > 30:
            ledger = context.ledger
    return SimpleNamespace(gradients=[p.grad.clone() for p in model.parameters()], ledger=ledger)


MODELS = {
    "dense": {},
    "window": {"sliding_window": 9},
    "experts": {"family": "mixtral", "n_experts": 4, "moe_ffn_dim": 32},
    "recomputed": {"recompute": True},
    "dropout": {"dropout": 0.1},
}


RECOMPUTED = {
    0.3: [False, False, False, True, False],
    0.75: [False, True, True, True, False],
    1.0: [True, True, True, True, False],
}


@pytest.mark.parametrize("ratio", RECOMPUTED)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_the_same_to_the_bit(name, ratio):
    found = []
    for how in ("off", "whole", "ahead"):
        model = build(**MODELS[name])
        torch.manual_seed(1)
        found.append(step(model, ratio, how))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0].gradients, other.gradients, strict=True))
    ledger = found[2].ledger
    # Recomputed layers save one storage each, and send as many as the ratio says of them together.
    assert name != "recomputed" or [bool(n) for n in ledger.sent] == RECOMPUTED[ratio]
    assert 0 < sum(ledger.sent) <= ratio * sum(ledger.saved[:-1])


def test_a_layer_is_fetched_while_the_one_behind_it_goes_backward(events):
    """Before any gradient of layer i is there, the copy of layer i - 1 has begun, and not before all those of layer
    i + 1 are. The backward pass never asks for a tensor that is not under way."""
    step(build(), 1.0, events=events)
    assert not [e for e in events if e[0] == "asked"]
    # The last layer stays.
    assert [layer for kind, layer in events if kind == "fetch"] == list(range(LAYERS - 2, -1, -1))
    for i in range(1, LAYERS):
        fetched = events.index(("fetch", i - 1))
        own = [at for at, event in enumerate(events) if event == ("grad", i)]
        # 7 matrices and 2 norms of a layer; the short document comes after the long one, with as many.
        assert len(own) == 2 * 9 and fetched < own[0]
        if i + 1 < LAYERS:
            assert fetched > [at for at, event in enumerate(events) if event == ("grad", i + 1)][8]


def test_without_prefetch_the_backward_pass_asks(events):
    """What the test above would find."""
    step(build(), 1.0, "whole", events=events)
    assert [e for e in events if e[0] == "asked"] and not [e for e in events if e[0] == "fetch"]


@pytest.mark.parametrize("name", ["dense", "window", "experts"])
def test_at_most_two_layers_are_on_the_device(name, events):
    ledger = step(build(**MODELS[name]), 1.0).ledger
    saved = ledger.saved
    assert len(saved) == LAYERS and ledger.sent == [*saved[:-1], 0]  # all but the last layer, whole
    two = max(a + b for a, b in itertools.pairwise(saved))
    assert max(saved) < ledger.peak <= two
    assert ledger.forward_peak <= max(saved) and ledger.resident == 0
    held = [layers for kind, layers in events if kind == "live"]
    assert held and all(len(layers) <= 2 and max(layers) - min(layers) <= 1 for layers in held)


@pytest.mark.parametrize("ratio", [0.3, 0.75])
def test_what_was_not_sent_is_there_besides(ratio):
    ledger = step(build(), ratio).ledger
    kept = [a - b for a, b in zip(ledger.saved, ledger.sent, strict=True)]
    for layers in range(1, LAYERS):  # what one leaves of its share is for those behind it
        assert sum(ledger.sent[:layers]) <= ratio * sum(ledger.saved[:layers])
    assert min(ledger.sent[:-1]) > 0 and ledger.sent[-1] == 0
    assert ledger.forward_peak == sum(kept)
    most = max(sum(kept[: i + 1]) + ledger.sent[i] + (ledger.sent[i - 1] if i else 0) for i in range(LAYERS))
    assert sum(kept) <= ledger.peak <= most and ledger.resident == 0


def test_rotations_that_all_layers_share_are_no_activations():
    """Else the last layer would have the first's brought back. All layers but the last, which keeps, send alike."""
    ledger = step(build(), 1.0).ledger
    assert len(set(ledger.saved)) == 1 and len(set(ledger.sent[:-1])) == 1


def test_hooks_are_gone_also_when_a_layer_fails(monkeypatch):
    model = build()
    monkeypatch.setattr(model.blocks[2].mlp, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, 1.0)
    assert not any(b._forward_hooks or b._forward_pre_hooks for b in model.blocks)
    x = torch.randn(3, requires_grad=True)
    offload = Offload([1.0], torch.device("cpu"))
    (x * x.exp()).sum().backward()  # nothing packs any more
    assert x.grad is not None and offload.ledger.saved == [0]


def test_compiled_layers_are_one_chunk():
    """Hooks that come after compiling do not run; what all layers save is offloaded as before."""
    model = build()
    for block in model.blocks:
        block.compile(backend="eager")
    context = ByteScale(None, 30, offload=lambda length: 1.0)
    with context.saving(context.micro_batches(batch(), 1)[0], model):
        pass
    assert len(context.ledger.saved) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("ratio", [0.75, 1.0])
def test_on_a_gpu(ratio):
    device = torch.device("cuda")
    found = [step(build(device), ratio, how, device=device) for how in ("off", "whole", "ahead")]
    for other in found[1:]:
        for a, b in zip(found[0].gradients, other.gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    ledger = found[2].ledger
    assert sum(ledger.sent) > 0 and ledger.resident == 0
    two = max(a + b for a, b in itertools.pairwise(ledger.saved))
    assert ratio < 1 or ledger.peak <= two
