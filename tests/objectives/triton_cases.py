"""Run as a program (with the device as argument): every case of the Triton kernel against the torch reference."""

import importlib
import itertools
import sys

import torch

from trainwright.objectives import linear_cross_entropy
from trainwright.objectives._linear_cross_entropy_triton import row_loss_triton

module = importlib.import_module("trainwright.objectives.linear_cross_entropy")


def compare(device: str, vocab: int, options: module.LossOptions, want_grad: bool, out_dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    logits = (3 * torch.randn(9, vocab, generator=g)).to(device)
    logits[3] = 0.5  # all equal: argmax is entry 0
    targets = torch.randint(0, vocab, (9,), generator=g).to(device)
    targets[:2] = logits[:2].argmax(-1)
    weights = torch.tensor([1.0, 0.0, 0.5, 1, 2, 1, 1, 0.25, 1], device=device)

    def run(kernel):  # type: ignore[no-untyped-def]
        y = logits.clone()
        out = None if not want_grad else y if out_dtype == torch.float32 else torch.empty_like(y, dtype=out_dtype)
        return kernel(y, targets, weights, options, out), out

    (terms, grad), (want_terms, want_grad_) = run(row_loss_triton), run(module.row_loss)
    torch.testing.assert_close(terms, want_terms, rtol=1e-5, atol=1e-5)
    if want_grad:
        tolerance = 1e-6 if out_dtype == torch.float32 else 1e-2
        torch.testing.assert_close(grad, want_grad_, rtol=1e-4 if tolerance == 1e-6 else tolerance, atol=tolerance)


def whole_loss(device: str) -> None:
    """The fused loss with this kernel in the place of the reference: same loss, same gradients."""
    results = []
    for row_loss in (row_loss_triton, module.row_loss):
        module._row_loss_for = lambda device, dtype, f=row_loss: f
        torch.manual_seed(0)
        hidden = torch.randn(21, 8, device=device, requires_grad=True)
        weight = torch.randn(37, 8, device=device, requires_grad=True)
        bias = torch.randn(37, device=device, requires_grad=True)
        targets = torch.randint(0, 37, (21,), device=device)
        weights = torch.rand(21, device=device)
        loss, metrics = linear_cross_entropy(
            hidden, weight, targets, weights, bias=bias, softcap=5.0, z_loss=1e-2, label_smoothing=0.1, chunk_tokens=8
        )
        results.append([loss, *metrics.values(), *torch.autograd.grad(loss, (hidden, weight, bias))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def main(device: str) -> None:
    count = 0
    for vocab, softcap, z_loss, smoothing in itertools.product((50, 256, 9001), (None, 4.0), (0.0, 0.05), (0.0, 0.1)):
        options = module.LossOptions(softcap=softcap, z_loss=z_loss, label_smoothing=smoothing)
        for want_grad, dtype in ((True, torch.float32), (True, torch.bfloat16), (False, torch.float32)):
            compare(device, vocab, options, want_grad, dtype)
        count += 1
    whole_loss(device)
    print(f"all {count} cases equal")


if __name__ == "__main__":
    main(sys.argv[1])
