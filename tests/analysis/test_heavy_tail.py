"""Hill's exponent against samples of known tails and random matrices."""

import math

import pytest
import torch

from trainwright.analysis.heavy_tail import alpha, gaussian_alpha, hill_alpha, spectrum


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("exponent", [2.0, 3.0, 4.0])
def test_pareto_samples(exponent):
    u = torch.rand(200_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert float(hill_alpha(u ** (-1 / (exponent - 1)))) == pytest.approx(exponent, abs=0.03)


def test_it_is_the_equation():
    values = [5.0, 1.0, 9.0, 2.0, 30.0]  # ascending: 1 2 5 9 30, the tail begins at 5
    expected = 1 + 3 / (math.log(9 / 5) + math.log(30 / 5))
    assert float(hill_alpha(torch.tensor(values, dtype=torch.float64))) == pytest.approx(expected, rel=1e-12)
    both = torch.tensor([values, [3.0 * v for v in reversed(values)]], dtype=torch.float64)
    assert hill_alpha(both).tolist() == pytest.approx([expected, expected])  # each row alone, whatever the unit


@pytest.mark.parametrize("shape, expected", [((256, 256), 2.1), ((128, 344), 3.05), ((64, 1024), 5.9)])
def test_gaussian_matrices(shape, expected):
    measured = float(alpha(draw(8, *shape)).mean())
    assert measured == pytest.approx(expected, abs=0.12)
    assert gaussian_alpha(*shape) == pytest.approx(measured, rel=0.03)
    assert gaussian_alpha(*shape) == gaussian_alpha(*reversed(shape))


def test_the_law_is_met_better_by_larger_matrices():
    errors = [abs(float(alpha(draw(6, n, 4 * n)).mean()) / gaussian_alpha(n, 4 * n) - 1) for n in (16, 256)]
    assert errors[1] < 0.01 < errors[0]


def test_a_matrix_of_known_spectrum():
    left, right = torch.linalg.qr(draw(40, 40, seed=1))[0], torch.linalg.qr(draw(60, 40, seed=2))[0]
    s = torch.logspace(0, -2, 40, dtype=torch.float64)
    w = left @ torch.diag(s) @ right.T
    torch.testing.assert_close(spectrum(w), s.square())
    expected = hill_alpha(s.square())
    for m in (w, w.T, 7.0 * w):
        assert float(alpha(m)) == pytest.approx(float(expected), rel=1e-9)
    assert alpha(torch.stack([w, 2 * w])).shape == (2,)
    assert float(alpha(w.bfloat16())) == pytest.approx(float(expected), rel=0.02)


def test_spectra_without_a_tail():
    low_rank = draw(40, 5, dtype=torch.float32) @ draw(5, 30, seed=1, dtype=torch.float32)
    assert alpha(torch.zeros(8, 8)).isnan() and alpha(low_rank).isnan()
    nearly = draw(40, 20, dtype=torch.float32) @ draw(20, 30, seed=1, dtype=torch.float32)
    assert alpha(nearly).isfinite()  # 20 of 30: the upper half is whole
    assert float(hill_alpha(torch.ones(6))) == math.inf
    assert alpha(torch.zeros(3, 0, 4)).isnan().all()


def test_vectors_are_refused():
    with pytest.raises(ValueError, match="of matrices"):
        alpha(torch.ones(5))
