"""What every objective must do, for all that are registered, on a small language model of the tests' own."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from trainwright.core.batch import Batch
from trainwright.core.registry import build, methods
from trainwright.models.base import Head, Hidden, LanguageModel
from trainwright.objectives import NextToken

VOCAB, DIM = 29, 12
OBJECTIVES = [m.name for m in methods("objective")]


class Recurrent(LanguageModel):
    """Embedding, one layer that mixes a document's past, tied head. float64, so that equalities are sharp."""

    def __init__(self, aux=None):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM, dtype=torch.float64)
        self.blocks = nn.ModuleList([nn.Linear(DIM, DIM, dtype=torch.float64)])
        self.bias = nn.Parameter(torch.zeros(VOCAB, dtype=torch.float64))
        self.vocab_size, self.max_seq_len, self.aux = VOCAB, 64, aux

    def forward(self, tokens, *, positions=None, doc_ids=None, cache=None, head_fn=None):
        x = self.embed(tokens)
        past = torch.ones(tokens.shape[1], tokens.shape[1]).tril().bool() & (doc_ids[:, :, None] == doc_ids[:, None, :])
        x = x + torch.tanh(self.blocks[0](past.to(x.dtype) @ x)) + 0.01 * positions[..., None]
        aux = None if self.aux is None else self.aux * (self.embed.weight**2).mean()
        hidden = Hidden(x, Head(self.embed.weight, self.bias, softcap=9.0, scale=0.7), aux, {"load": x.mean().detach()})
        return head_fn(hidden) if head_fn else x @ self.embed.weight.T

    def param_roles(self):
        return {n: "embedding" for n, _ in self.named_parameters()}

    def flops_per_token(self, seq_len):
        return 0.0


def model(aux=None):
    torch.manual_seed(0)
    return Recurrent(aux)


def batch(rows=4, length=8, *, weights=None, seed=1, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(0, VOCAB, (2, rows, length), generator=g)
    doc_ids = (torch.arange(length) >= length // 2).int().expand(rows, length)
    positions = (torch.arange(length) % (length // 2)).expand(rows, length)
    if weights is None:
        weights = torch.rand(rows, length, generator=g, dtype=dtype) * (torch.rand(rows, length, generator=g) < 0.8)
    return Batch(tokens, targets, weights, positions, doc_ids)


def gradients(objective, net, batches):
    """Gradient of the global mean: sums over the micro-batches divided by the global weight; and the mean itself."""
    net.zero_grad()
    total = sum(b.weight() for b in batches)
    value = 0.0
    for b in batches:
        loss = objective(net, b)
        (loss.sum / total).backward()
        value += loss.sum.item() / total.item()
    return {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}, value


def close(a, b, atol=1e-9):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-6, atol=atol, msg=name)


@pytest.fixture(params=OBJECTIVES)
def objective(request):
    return build("objective", request.param).build()


@pytest.mark.parametrize("aux", [None, 0.3])
def test_splitting_into_micro_batches_changes_nothing(objective, aux):
    """Micro-batches with 1 and 7 target tokens against one batch of 8 (a mean of means is off by 95 %)."""
    weights = torch.zeros(2, 8)
    weights[0, 3] = 1
    weights[1, :7] = 1
    whole = batch(2, weights=weights)
    parts = whole.split(1)
    assert [b.weight().item() for b in parts] == [1, 7]
    net = model(aux)
    one, loss_one = gradients(objective, net, [whole])
    two, loss_two = gradients(objective, net, parts)
    close(one, two)
    assert loss_one == pytest.approx(loss_two, rel=1e-9)


def test_metrics_are_sums(objective):
    whole = batch(4)
    net = model(0.3)
    one = objective(net, whole).metrics
    parts = [objective(net, b).metrics for b in whole.split(1)]
    for name, value in one.items():
        assert not value.requires_grad and value.ndim == 0
        if name != "load":  # the model's own average over the rows' hidden states, not over the loss weights
            assert value.item() == pytest.approx(sum(p[name].item() for p in parts), rel=1e-5), name


def test_all_masked_batch_gives_zero_and_no_nan(objective):
    net = model(0.3)
    loss = objective(net, batch(2, weights=torch.zeros(2, 8)))
    assert loss.sum.item() == 0 and loss.weight.item() == 0 and loss.weight.dtype == torch.float64
    loss.sum.backward()
    for p in net.parameters():
        assert p.grad is not None and not p.grad.any()
    # beside a batch that has weight it adds nothing
    with_empty = gradients(objective, net, [batch(3), batch(2, weights=torch.zeros(2, 8))])
    alone = gradients(objective, net, [batch(3)])
    close(with_empty[0], alone[0])
    assert with_empty[1] == alone[1]


def test_gradient_reaches_every_parameter_and_points_downhill(objective):
    net = model()
    b = batch(4)
    grads, before = gradients(objective, net, [b])
    assert grads.keys() == dict(net.named_parameters()).keys() and all(g.any() for g in grads.values())
    with torch.no_grad():
        for n, p in net.named_parameters():
            p -= 1e-4 * grads[n]
    _, after = gradients(objective, net, [b])
    slope = -1e-4 * sum((g**2).sum().item() for g in grads.values())
    assert after - before == pytest.approx(slope, rel=0.05)


def test_weights_are_respected(objective):
    """Twice the weights give twice the sum; the loss of two halves is the loss of the whole."""
    net = model()
    b = batch(4, weights=torch.ones(4, 8))
    half = torch.zeros(4, 8)
    half[:, ::2] = 1
    sums = [
        objective(net, dataclasses.replace(b, weights=w)).sum.item() for w in (b.weights, 2 * b.weights, half, 1 - half)
    ]
    assert sums[1] == pytest.approx(2 * sums[0], rel=1e-6)
    assert sums[2] + sums[3] == pytest.approx(sums[0], rel=1e-6)
    assert sums[2] != pytest.approx(sums[3], rel=1e-3)


def test_padding_changes_nothing(objective):
    """Rows lengthened by a padding document of weight 0, whatever is written in it."""
    b = batch(3)
    pad = 5

    def longer(x, value):
        return torch.cat([x, torch.full((3, pad), value, dtype=x.dtype)], 1)

    def padded(token):
        return Batch(
            longer(b.tokens, token),
            longer(b.targets, token),
            longer(b.weights, 0),
            longer(b.positions, 0),
            longer(b.doc_ids, 99),
        )

    net = model()
    want, loss = gradients(objective, net, [b])
    for token in (0, 17):
        got, padded_loss = gradients(objective, net, [padded(token)])
        assert padded_loss == pytest.approx(loss, rel=1e-9)
        close(got, want)


def test_documents_of_weight_zero_leave_the_others_alone(objective):
    b = batch(3)
    b.weights[:, :4] = 0
    other = dataclasses.replace(b, targets=b.targets.clone())
    other.targets[:, :4] = (other.targets[:, :4] + 5) % VOCAB
    net = model()
    assert objective(net, b).sum.item() == objective(net, other).sum.item()


def test_no_graph_without_grad(objective):
    net = model(0.3)
    with torch.no_grad():
        loss = objective(net, batch(2))
    assert not loss.sum.requires_grad
    assert loss.sum.item() == pytest.approx(objective(net, batch(2)).sum.item(), rel=1e-12)


def test_next_token_is_the_sum_of_its_parts():
    b, net = batch(4), model(0.3)
    loss = NextToken(z_loss=1e-2)(net, b)
    m = {k: v.item() for k, v in loss.metrics.items()}
    assert loss.sum.item() == pytest.approx(m["nll"] + m["z_loss"] + m["aux_loss"], rel=1e-9)
    assert m["aux_loss"] == pytest.approx(0.3 * (net.embed.weight**2).mean().item() * b.weight().item(), rel=1e-6)
    assert m["z_loss"] > 0 and 0 <= m["correct"] <= b.weight().item()


def test_next_token_at_uniform_logits_is_log_vocab():
    net = model()
    nn.init.zeros_(net.embed.weight)
    b = batch(4)
    loss = NextToken()(net, b)
    assert loss.sum.item() / loss.weight.item() == pytest.approx(math.log(VOCAB), rel=1e-6)


def test_next_token_options_reach_the_loss():
    net, b = model(), batch(4)
    plain = NextToken()(net, b)
    assert NextToken(label_smoothing=0.2)(net, b).sum.item() != pytest.approx(plain.sum.item(), rel=1e-4)
    assert NextToken(chunk_tokens=3)(net, b).sum.item() == pytest.approx(plain.sum.item(), rel=1e-12)
    config = build("objective", {"name": "next_token", "z_loss": 1e-4, "label_smoothing": 0.1, "chunk_tokens": 64})
    assert config.build() == NextToken(1e-4, 0.1, 64)
