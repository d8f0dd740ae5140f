"""Sentences about the runs, each computed from the data that the chart beside it shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megatron_ext.report.view import Series, View, common_axis, ending, frame_max_vio

# Runs whose own tokens differ by no more than this were trained equally long.
EQUAL_TOKENS = 0.01
# Curves of runs start apart while the optimizer warms up; a gap there says little.
GAP_FROM = 0.1


@dataclass(frozen=True)
class Gap:
    """The largest difference between two curves: `values` of `lower` are below those of `upper` there."""

    lower: str
    upper: str
    size: float
    at: float
    axis: str
    held_out: bool


def short(number: float) -> str:
    """Return a number for people: three significant digits, k, M, G for large ones."""
    for factor, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(number) >= factor:
            scale = 1e3 if suffix == "k" else factor
            return f"{number / scale:.3g}{suffix}"
    return f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def place(value: float, axis: str) -> str:
    """Return a point of the x axis in words."""
    return f"{short(value)} tokens" if axis == "tokens" else f"step {value:.0f}"


def largest_gap(views: Sequence[View]) -> Gap | None:
    """Return the largest gap between any two runs where they overlap: held out if all have that, else in training."""
    axis = common_axis(views)
    held_out = len(views) > 1 and all(len(view.held_out()) > 1 for view in views)
    found: list[Gap] = []
    for first, second in combinations(views, 2):
        one, two = (view.held_out() if held_out else view.loss() for view in (first, second))
        gap = _gap(one, two, axis)
        if gap is not None:
            size, at = gap
            lower, upper = (first, second) if size < 0 else (second, first)
            found.append(Gap(lower.label, upper.label, abs(size), at, axis, held_out))
    return max(found, key=lambda gap: gap.size, default=None)


def equally_long(views: Sequence[View]) -> list[View]:
    """Return the runs with as many tokens of their own as the most others; empty where no two are alike.

    Runs that start from a checkpoint and runs from scratch are compared like that: each from its own start.
    """
    if common_axis(views) != "tokens":
        return []
    groups = [
        [other for other in views if abs(other.own_tokens() - view.own_tokens()) <= EQUAL_TOKENS * view.own_tokens()]
        for view in views
        if view.own_tokens() > 0
    ]
    best = max(groups, key=len, default=[])
    starts = {float(loss.tokens[0]) for view in best if len(loss := view.loss()) and loss.tokens is not None}
    # Runs that began at the same token lie side by side in the common chart already.
    return best if len(best) > 1 and len(starts) > 1 else []


def equal_tokens_sentence(views: Sequence[View]) -> str:
    """Say where runs that were trained equally long end, lowest first: held out if all have that, else in training."""
    held_out = all(len(view.held_out()) for view in views)
    ends = [((view.held_out() if held_out else view.loss()), view.label) for view in views]
    ordered = sorted((ending(series.values), label) for series, label in ends if len(series))
    kind = "held-out" if held_out else "training"
    listed = ", ".join(f"{label} {value:.3f}" for value, label in ordered)
    return f"After {short(views[0].own_tokens())} tokens of their own, {kind} loss: {listed}."


def _gap(one: Series, two: Series, axis: str) -> tuple[float, float] | None:
    """Return (one - two, where) at the largest difference inside their common range; None if they don't overlap."""
    if len(one) < 2 or len(two) < 2:
        return None
    low, high = (pick(one.x(axis)[end], two.x(axis)[end]) for pick, end in ((max, 0), (min, -1)))
    low = low + GAP_FROM * (high - low)
    at = np.unique(np.concatenate([one.x(axis), two.x(axis)]))
    at = at[(at >= low) & (at <= high)]
    if not len(at) or high <= low:
        return None
    smooth = [np.interp(at, curve.x(axis), _smooth(curve.values)) for curve in (one, two)]
    difference = smooth[0] - smooth[1]
    worst = int(np.abs(difference).argmax())
    return float(difference[worst]), float(at[worst])


def _smooth(values: np.ndarray) -> np.ndarray:
    """Return the running mean over a fiftieth of the curve: single noisy steps are no gap."""
    width = max(len(values) // 50, 1)
    if width == 1:
        return values
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.full(width, 1.0 / width), mode="valid")


def loss_sentences(views: Sequence[View]) -> list[str]:
    """Say how each run's losses moved, where two runs differ most, and where runs of equal length end."""
    sentences = [text for view in views if (text := _loss_sentence(view))]
    gap = largest_gap(views)
    if gap is not None:
        kind = "held-out" if gap.held_out else "training"
        sentences.append(
            f"The largest {kind} gap is {gap.size:.3f}, at {place(gap.at, gap.axis)}: {gap.lower} is below {gap.upper}."
        )
    elif len(views) > 1:
        stretch = "tokens" if common_axis(views) == "tokens" else "steps"
        sentences.append(f"The runs share no stretch of {stretch}, so there is no gap to name.")
    alike = equally_long(views)
    return [*sentences, equal_tokens_sentence(alike)] if alike else sentences


def _loss_sentence(view: View) -> str:
    train, held = view.loss(), view.held_out()
    if not len(train) and not len(held):
        return f"{view.label} has logged no loss yet."
    parts = []
    if len(train):
        parts.append(f"training loss {_moved(train.values)}")
    if len(held):
        parts.append(f"held-out loss {_moved(held.values)}")
    broken = train.dropped + held.dropped
    note = f" {broken} of its values were not finite and are not drawn." if broken else ""
    return f"{view.label}: {', '.join(parts)}, over {view.run.rows[-1].step - view.run.rows[0].step + 1} steps.{note}"


def _moved(values: np.ndarray) -> str:
    start, end = float(values[0]), ending(values)
    if len(values) == 1:
        return f"was {start:.3f} at its only point"
    verb = "fell" if end < start else "rose" if end > start else "stayed"
    return f"{verb} from {start:.3f} to {end:.3f}"


def max_vio_sentences(views: Sequence[View]) -> list[str]:
    """Say how uneven the load was at worst and is now."""
    sentences = []
    for view in views:
        worst = view.max_vio("max")
        if not len(worst):
            continue
        peak = int(worst.values.argmax())
        mean = view.max_vio("mean")
        middle = f" ({1 + ending(mean.values):.2f} times on average over the layers)" if len(mean) else ""
        sentences.append(
            f"{view.label}: the busiest expert of the worst layer gets {1 + ending(worst.values):.2f} times an even "
            f"share at the end{middle}; the peak was {1 + worst.values[peak]:.2f} times at step {worst.steps[peak]}."
        )
    return sentences


def heat_sentence(view: View) -> str:
    """Say what the last routing frame shows: the busiest expert, and those without a token."""
    frame = view.run.routing[-1]
    vio = frame_max_vio(frame.counts)
    row = int(vio.argmax())
    busiest, quietest = int(frame.counts[row].argmax()), int(frame.counts[row].argmin())
    even = max(float(frame.counts[row].mean()), 1e-12)
    idle = frame.counts == 0
    layers_with_idle = [int(frame.layers[at]) for at in np.flatnonzero(idle.any(axis=1))]
    text = (
        f"At step {frame.step} the most uneven layer is {frame.layers[row]}: its expert {busiest} gets "
        f"{1 + vio[row]:.2f} times an even share, its expert {quietest} {frame.counts[row].min() / even:.2f} times. "
    )
    if not idle.any():
        return text + f"All {idle.size} experts of {len(frame.layers)} layers got tokens."
    where = ", ".join(map(str, layers_with_idle[:8])) + (" ..." if len(layers_with_idle) > 8 else "")
    noun = "layer" if len(layers_with_idle) == 1 else "layers"
    return text + f"{int(idle.sum())} of {idle.size} experts got no token, in {noun} {where}."
