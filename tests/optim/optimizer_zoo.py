"""A small network that has every role of parameter, for the optimizer suites."""

import torch
from torch import nn

from trainwright.core.params import NamedParam

ROLES = {
    "embed.weight": "embedding",
    "up": "matrix",
    "down": "matrix",
    "square": "matrix",
    "experts": "expert",
    "router": "router",
    "norm": "norm",
    "bias": "bias",
    "gain": "scalar",
    "head": "head",
}


class Zoo(nn.Module):
    """tokens [B, T] -> [B, T, 5]; shapes are odd on purpose, so that shards are uneven and some are empty."""

    def __init__(self, scalar=True, dtype=torch.float32, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)

        def draw(*shape, scale=0.4):
            return nn.Parameter((torch.randn(*shape, generator=g) * scale).to(dtype))

        self.embed = nn.Embedding(11, 6)
        self.embed.weight = draw(11, 6, scale=1.0)
        self.up, self.down, self.square = draw(13, 6), draw(6, 13), draw(6, 6)
        self.experts, self.router = draw(3, 6, 6), draw(3, 6)
        self.norm, self.bias = nn.Parameter(torch.ones(6, dtype=dtype)), nn.Parameter(torch.zeros(1, dtype=dtype))
        self.head = draw(5, 6)
        if scalar:  # FSDP2 shards no 0-d parameter
            self.gain = nn.Parameter(torch.ones((), dtype=dtype))

    def forward(self, tokens):
        h = self.embed(tokens)
        h = h + torch.relu(h @ self.up.T + self.bias) @ self.down.T
        gates = torch.softmax(h @ self.router.T, -1)  # [B, T, E]
        h = h + torch.einsum("bte,eoi,bti->bto", gates, self.experts, h)
        h = (h @ self.square.T) * self.norm * getattr(self, "gain", 1.0)
        return h @ self.head.T


def named(model):
    return [NamedParam(n, p, ROLES[n]) for n, p in model.named_parameters() if p.requires_grad]


def batch(seed, rows=8, dtype=torch.float32):
    g = torch.Generator().manual_seed(100 + seed)
    tokens = torch.randint(0, 11, (rows, 7), generator=g)
    table = torch.randn(11, 5, generator=torch.Generator().manual_seed(5))
    return tokens, table[tokens].to(dtype)


def backward(model, data, scale=1.0):
    tokens, wanted = data
    loss = ((model(tokens) - wanted) ** 2).mean()
    (loss * scale).backward()
    return float(loss.detach())


def train(model, optimizer, steps, first=0):
    losses = []
    for i in range(first, first + steps):
        losses.append(backward(model, batch(i)))
        optimizer.step()
        optimizer.zero_grad()
    return losses
