"""Compare the monitor's Triton kernels with the torch path over random tables: on `cuda`, or on `cpu` interpreted.

    python tally_kernel_check.py DEVICE [FIRST LAST]      (seeds)

Sums must agree to 1e-6 relative, counts exactly. Prints how many cases agreed; exits 1 with the first that doesn't.
"""

from __future__ import annotations

import random
import sys

import numpy as np
import torch
from torch import Tensor

from megatron_ext.observe import formulas, tally, tally_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def agree(what: str, seed: int, got: Tensor, want: Tensor) -> None:
    """Raise where the kernel's sums are not the reference's."""
    torch.testing.assert_close(
        got.cpu(), want.cpu(), rtol=1e-6, atol=1e-9, equal_nan=True, msg=lambda text: f"{what}, seed {seed}: {text}"
    )


def chosen_of(table: Tensor, topk: int) -> Tensor:
    """Return bool [T, E]: the largest `topk` of each row."""
    return torch.zeros_like(table, dtype=torch.bool).scatter(1, table.topk(topk, -1).indices, True)


def plain_logit_sums(logits: Tensor, valid: Tensor | None) -> Tensor:
    """Return the token count and the sums of logsumexp^2 and of entropies, by the offline readers' formulas."""
    z = (logits if valid is None else logits[valid]).float().double().numpy()
    lse = formulas.logsumexp(z)
    shares = np.exp(z - lse[:, None])
    entropy = formulas.normalized_entropy(shares).sum() if z.shape[1] > 1 else 0.0
    return torch.tensor([len(z), (lse**2).sum(), entropy], dtype=torch.float64)


def check_tokens(seed: int, device: str) -> None:
    """One random router call."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tokens, experts = draw.choice([1, 3, 40, 129]), draw.choice([1, 2, 7, 64, 160])
    topk = min(draw.choice([1, 2, 8]), experts)
    logits = (torch.randn(tokens, experts) * draw.choice([0.01, 1.0, 30.0])).to(draw.choice(DTYPES))
    valid = None if draw.random() < 0.4 else torch.rand(tokens) < 0.8
    exact = logits.float() + 0.02 * torch.randn(tokens, experts)
    maps = {name: chosen_of(values, topk) for name, values in (("native", logits), ("exact", exact))}
    maps["chosen"] = maps["native"] & (torch.rand(tokens, experts) < 0.97)
    coarse = chosen_of(exact.bfloat16(), topk) if draw.random() < 0.5 else None
    order = torch.rand(tokens) < 0.3 if draw.random() < 0.5 else None
    probs = torch.softmax(logits.float(), -1).masked_fill(~maps["chosen"], 0.0) * draw.choice([1.0, 2.5])
    probs[torch.rand(tokens) < 0.1] = 0.0
    scores = torch.softmax(logits.float(), -1) * (1.0 if valid is None else valid[:, None])

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    on = {name: values.to(device) for name, values in maps.items()}
    # The torch path sums entropies of fp32, the kernel of fp64, as NumPy does.
    agree("logits", seed, tally_kernels.logit_sums(logits.to(device), there(valid)), plain_logit_sums(logits, valid))
    want = tally.weight_sums(probs, topk, valid)
    agree("weights", seed, tally_kernels.weight_sums(probs.to(device), topk, there(valid)), want)
    want = tally.flip_sums(**maps, coarse=coarse, order=order, valid=valid)
    flips = tally_kernels.flip_sums(**on, coarse=there(coarse), order=there(order), valid=there(valid))
    assert torch.equal(flips.cpu(), want), f"flips, seed {seed}: {flips} {want}"
    want = tally.aux_sums(maps["chosen"], maps["exact"], scores, valid)
    aux = tally_kernels.aux_sums(on["chosen"], on["exact"], scores.to(device), there(valid))
    assert torch.equal(aux[:2].cpu(), want[:2]), f"aux, seed {seed}"
    agree("scores", seed, aux, want)


def check_rows(seed: int, device: str) -> None:
    """One random expert call: experts without rows, rows without weight, rows that belong to nobody."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    experts, hidden, pad = draw.choice([1, 2, 5, 64]), draw.choice([1, 24, 256, 1500]), draw.choice([0, 0, 8])
    counts = torch.tensor([draw.choice([0, 1, 3, 17]) for _ in range(experts)])
    if draw.random() < 0.2:
        counts[draw.randrange(experts)] = 1100
        hidden = 24
    spare = draw.choice([0, 0, 5])
    rows = int(counts.sum()) + spare
    scale = 10.0 ** torch.randint(-6, 4, (experts,))
    factors = torch.cat([scale.repeat_interleave(counts), torch.full((spare,), 1e4)])
    weights = torch.rand(rows).masked_fill(torch.rand(rows) < 0.1, 0.0) if draw.random() < 0.7 else None
    output = (torch.randn(rows, hidden + pad) * factors[:, None]).to(draw.choice([torch.float32, torch.bfloat16]))
    output = output[:, :hidden]
    given = counts.int() if draw.random() < 0.5 else counts
    want = tally.expert_row_sums(output, weights, given)
    got = tally_kernels.expert_row_sums(
        output.to(device), None if weights is None else weights.to(device), given if seed % 2 else given.to(device)
    )
    assert torch.equal(got[0].cpu(), want[0]), f"rows, seed {seed}: {got[0]} {want[0]}"
    for expert in range(experts):
        agree(f"mean squares of expert {expert}", seed, got[1, expert], want[1, expert])


def main() -> int:
    """Run the cases."""
    device = sys.argv[1]
    seeds = range(*(int(word) for word in sys.argv[2:4] or (0, 20)))
    for seed in seeds:
        check_tokens(seed, device)
        check_rows(seed, device)
    print(f"{len(seeds)} cases agree on {device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
