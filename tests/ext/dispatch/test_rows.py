"""The row kernels: torch path on worked numbers, Triton (in its interpreter, no GPU) against the torch path."""

from __future__ import annotations

from pathlib import Path

import pytest
import seed_ranges
import torch

from megatron_ext.dispatch.rows import copy_rows, gather_weights, spread_rows, spread_weights, sum_rows

SLOTS = torch.tensor([[2, 0, -1], [-1, -1, -1], [1, 3, 4]], dtype=torch.int32)


def test_spread_writes_each_row_to_its_slots_in_both_buffers() -> None:
    src = torch.tensor([[1.0], [2.0], [3.0]])
    far, near = torch.zeros(3, 1), torch.zeros(2, 1)
    spread_rows(src, SLOTS, far, near)
    assert far.flatten().tolist() == [1, 3, 1]
    assert near.flatten().tolist() == [3, 3]


def test_sum_adds_the_slots_of_each_row_and_leaves_zero_without_any() -> None:
    far, near = torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[1000.0], [10000.0]])
    out = torch.full((3, 1), 7.0)
    sum_rows(SLOTS, far, near, out)
    assert out.flatten().tolist() == [101, 0, 11010]


def test_sum_runs_in_fp32_and_rounds_once() -> None:
    # 256 + 1 is lost in bf16 (8 bits), 256 + 1 + 1 is not.
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    sum_rows(torch.tensor([[0, 1, 2]], dtype=torch.int32), rows, None, out)
    assert out.item() == 258


@pytest.mark.parametrize(("width", "pitch", "offset"), [(8, 12, 0), (8, 12, 1), (7, 12, 0), (8, 13, 0), (8, 8, 4)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_are_copied_whatever_their_alignment(width: int, pitch: int, offset: int, dtype: torch.dtype) -> None:
    src = torch.randn(3 * width + offset).to(dtype)[offset:].view(3, width)
    room = torch.full((3, pitch), 7.0, dtype=dtype)
    copy_rows(src, room[:, :width])
    assert torch.equal(room[:, :width], src)
    assert (room[:, width:] == 7).all()


def test_weights_go_to_their_slots_and_come_back() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]])
    flat = torch.full((6,), 9.0)
    spread_weights(weights, SLOTS, flat)
    assert torch.equal(flat, torch.tensor([0.2, 0.7, 0.1, 0.8, 0.9, 9.0]))
    assert torch.equal(gather_weights(flat, SLOTS), torch.tensor([[0.1, 0.2, 0], [0, 0, 0], [0.7, 0.8, 0.9]]))


def test_spread_and_sum_are_adjoint() -> None:
    made = torch.Generator().manual_seed(0)
    src, far, near = (torch.randn(n, 5, generator=made, dtype=torch.float64) for n in (3, 3, 2))
    out_far, out_near, home = torch.zeros_like(far), torch.zeros_like(near), torch.empty_like(src)
    spread_rows(src, SLOTS, out_far, out_near)
    sum_rows(SLOTS, far, near, home)
    assert torch.allclose((out_far * far).sum() + (out_near * near).sum(), (src * home).sum())


@pytest.mark.timeout(300)
def test_triton_kernels_equal_the_torch_path_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes of their own: Triton reads the interpreter switch when it is imported."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    printed = seed_ranges.run(Path(__file__).with_name("kernel_check.py"), "cpu", 30, processes=2)
    assert printed == ["15 cases equal on cpu"] * 2


def test_a_failing_range_of_seeds_fails_with_what_it_printed(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text("import sys; print(*sys.argv[1:]); sys.exit(sys.argv[2] == '1')")
    assert seed_ranges.run(script, "cpu", 2, processes=1) == ["cpu 0 2"]
    with pytest.raises(AssertionError, match=r"^cpu 1 3\n$"):
        seed_ranges.run(script, "cpu", 5, processes=3)
