"""Worked numbers by hand, the definitions' own example first, then the edges."""

import math

import numpy as np
import pytest

from megatron_ext.observe import formulas

# The four-GPU example: two experts a rank, 8,192 assignments.
LOADS = np.array([3072, 1024, 1024, 1024, 512, 512, 512, 512])


def test_the_four_gpu_example_exactly():
    assert LOADS.sum() == 8192
    assert formulas.max_vio(LOADS) == 2.0
    assert formulas.rank_loads(LOADS, 4).tolist() == [4096, 2048, 1024, 1024]
    assert formulas.max_vio(formulas.rank_loads(LOADS, 4)) == 1.0
    assert LOADS.sum() * 2048 * 2 == 32 * 2**20


def test_even_and_one_sided_loads():
    assert formulas.max_vio(np.array([5, 5, 5, 5])) == 0.0
    # Every one of T tokens picks expert 0 and one other: n = (T, T/3, ..), so E/k - 1 = 1.
    assert formulas.max_vio(np.array([9, 3, 3, 3])) == 1.0
    assert np.isnan(formulas.max_vio(np.zeros(4)))
    assert formulas.load_cv(np.array([5, 5, 5, 5])) == 0.0
    assert formulas.load_cv(np.array([1, 3])) == 0.5


def test_layers_stay_apart():
    load = np.array([[4, 4], [8, 0]])
    assert formulas.max_vio(load).tolist() == [0.0, 1.0]
    assert formulas.dead_share(load).tolist() == [0.0, 0.5]
    assert formulas.normalized_entropy(load).tolist() == [1.0, 0.0]


def test_entropy_of_one_and_three_quarters():
    expected = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)) / math.log(2)
    assert formulas.normalized_entropy(np.array([1, 3])) == pytest.approx(expected, rel=1e-12)


def test_dropped_and_padded_assignments():
    assert formulas.drop_share(np.array([[6, 2]]), np.array([5]), topk=2) == pytest.approx([0.2])
    assert formulas.drop_share(np.array([[6, 6]]), np.array([5]), topk=2) == pytest.approx([-0.2])


def test_the_balance_loss_is_blind_to_a_skewed_load_under_flat_probabilities():
    skewed = np.array([90, 10, 0, 0])
    assert formulas.balance_loss(skewed, np.ones(4)) == pytest.approx(1.0)
    # f = (.9, .1), P = (.7, .1, .1, .1): 4 * (.63 + .01)
    assert formulas.balance_loss(skewed, np.array([7, 1, 1, 1])) == pytest.approx(2.56)


def test_mutual_information():
    assert formulas.mutual_information_bits(np.array([[5, 0], [0, 5]])) == pytest.approx(1.0)
    assert formulas.mutual_information_bits(np.array([[2, 4], [1, 2]])) == pytest.approx(0.0, abs=1e-12)
    p = np.array([[0.4, 0.1], [0.2, 0.3]])
    by_hand = 0.4 * math.log2(0.4 / 0.3) + 0.1 * math.log2(0.1 / 0.2) + 0.2 * math.log2(0.2 / 0.3)
    by_hand += 0.3 * math.log2(0.3 / 0.2)
    assert formulas.mutual_information_bits(p * 10) == pytest.approx(by_hand, rel=1e-12)
    assert np.isnan(formulas.mutual_information_bits(np.zeros((2, 2))))


def test_norm_ratios_leave_out_experts_without_tokens():
    ratios = formulas.norm_ratios(np.array([[1.0, 2.0, 40.0, np.nan], [np.nan] * 4, [0.0, 0.0, 0.0, 1.0]]))
    assert ratios.max_over_median[0] == 20.0
    assert ratios.min_over_median[0] == 0.5
    assert ratios.median[0] == 2.0
    assert np.isnan(ratios.max_over_median[1])
    assert ratios.median[2] == 0.0
    assert np.isnan(ratios.max_over_median[2])


def test_logsumexp_does_not_overflow():
    assert formulas.logsumexp(np.array([[1000.0, 1000.0]]))[0] == pytest.approx(1000 + math.log(2))
    assert formulas.z_rms(np.zeros((3, 8))) == pytest.approx(math.log(8))
    assert formulas.router_entropy(np.zeros((3, 8))) == pytest.approx(1.0)


def test_weights_by_hand():
    measures = formulas.weight_measures(np.array([[0.25, 0.75], [0.5, 0.5]]))
    assert measures.top_weight == 0.625
    assert measures.max1_over_max2 == 2.0
    entropy = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert measures.weight_entropy == pytest.approx((entropy + 1) / 2)
    sizes = [math.hypot(0.25, 0.75), math.hypot(0.5, 0.5)]
    assert measures.routed_size_mean == pytest.approx(np.mean(sizes))
    assert measures.routed_size_std == pytest.approx(np.std(sizes))


def test_spread_from_sums():
    values = np.array([1.0, 2.0, 4.0])
    assert formulas.std_over(values.sum(), (values**2).sum(), 3) == pytest.approx(values.std())
    assert np.isnan(formulas.std_over(np.array([0.0]), np.array([0.0]), np.array([0])))


def test_shortened_values_are_those_of_four_printed_digits():
    generator = np.random.default_rng(3)
    values = generator.standard_normal((50, 40)) * 10.0 ** generator.integers(-12, 12, (50, 40))
    assert formulas.shortened(values) == [[float(f"{value:.4g}") for value in row] for row in values.tolist()]
    assert formulas.shortened(np.array([np.nan, np.inf, 0.0, 99999.0, 1e-310])) == [None, None, 0.0, 1e5, 0.0]
    assert formulas.shortened(np.zeros((0, 3))) == []
