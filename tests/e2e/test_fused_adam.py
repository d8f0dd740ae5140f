"""Training with `--moe-ext-adam fused` beside Megatron's own step: losses, and checkpoints that go both ways.

On two gloo ranks, with the kernel in Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from megatron_run import MOCK, MODEL, MOE, TRAIN, losses, train

COMMON = [*MODEL, *MOE, *TRAIN, *MOCK, "--clip-grad", "0.1"]  # a clip that bites in every step
FUSED = ["--moe-ext-adam", "fused"]
SAYS = "clip, AdamW and the copy to the model's weights in one pass"


def _run(*flags: str, steps: int = 10) -> dict[int, float]:
    """Train to a step and return the losses."""
    done = train([*COMMON, *flags, "--train-iters", "10", "--exit-interval", str(steps)])
    assert done.returncode == 0, done.stdout[-3000:]
    assert (SAYS in done.stdout) == ("fused" in flags), done.stdout[-3000:]
    return {step: float(loss) for step, loss in losses(done.stdout).items()}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_losses_and_checkpoints_are_those_of_upstreams_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    whole, fused = _run(), _run(*FUSED)
    assert sorted(whole) == list(range(1, 11))
    assert whole[10] < whole[1]
    assert fused == pytest.approx(whole, rel=2e-6)
    # Each goes on with the checkpoint that the other's steps wrote.
    for first, then, name in ((FUSED, [], "ours"), ([], FUSED, "theirs")):
        folder = str(tmp_path / name)
        _run(*first, "--save", folder, "--save-interval", "5", steps=5)
        after = _run(*then, "--load", folder)
        # Megatron prints the mean of the first two steps of a start for the second.
        assert sorted(after) == [6, 7, 8, 9, 10]
        for step in (6, 8, 9, 10):
            assert after[step] == pytest.approx(whole[step], rel=2e-6), (name, step)
