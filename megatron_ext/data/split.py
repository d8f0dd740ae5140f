"""Which documents are held out: decided by a document's text alone, so that equal texts never sit on both
sides.
"""

from __future__ import annotations

import hashlib
from typing import Literal

Split = Literal["train", "valid"]
SPLITS: tuple[Split, ...] = ("train", "valid")
_RANGE = float(1 << 64)


def _uniform(text: str, salt: str) -> float:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8, key=salt.encode()[:64])
    return int.from_bytes(digest.digest(), "big") / _RANGE


def split_of(text: str, held_out: float, seed: int) -> Split:
    """Return "valid" for about `held_out` (0 to 1) of all texts, the same answer for the same text and seed.
    """
    return "valid" if _uniform(text, f"split-{seed}") < held_out else "train"


def is_sampled(text: str, sample_rate: float, seed: int) -> bool:
    """Say whether a text belongs to a random `sample_rate` (0 to 1) of the corpus, independently of its
    split.
    """
    return sample_rate >= 1.0 or _uniform(text, f"sample-{seed}") < sample_rate
