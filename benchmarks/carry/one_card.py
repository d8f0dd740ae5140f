"""Blank the GPU code for all cards but one in a CUDA library, so that it compresses to a fraction.

    python benchmarks/carry/one_card.py LIBRARY.so [...] [--sm 90]

Transformer Engine's library goes from 277 to 30 MB in xz that way. The file keeps its size and its symbols; on another
card the blanked code fails to load. Done in place.

A fat binary (`.nv_fatbin`) is a row of containers: 16 bytes (magic 0xBA55ED50, version, header size, length of what
follows), then entries, each with a header (kind 1: PTX, 2: machine code; header size at byte 4, length at 8, the card's
number at 28) and its code. The layout is not documented; what does not look like it is left alone.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections import Counter
from pathlib import Path

MAGIC = struct.pack("<I", 0xBA55ED50)
_CONTAINER = 16  # bytes of its header
_CARD_AT = 28  # in an entry's header


def blank_other_cards(data: bytearray, card: int) -> Counter[int]:
    """Zero the code of every other card in `data`, in place; return the bytes of code found for each card.

    Args:
        data: A whole library.
        card: The compute capability to keep, 90 for Hopper.
    """
    found: Counter[int] = Counter()
    at = data.find(MAGIC)
    while at >= 0:
        end = _end(data, at)
        if end is None:
            at = data.find(MAGIC, at + len(MAGIC))
            continue
        entry = at + _CONTAINER
        while entry + _CARD_AT + 4 <= end:
            kind, header, length = struct.unpack_from("<H2xIQ", data, entry)
            (of,) = struct.unpack_from("<I", data, entry + _CARD_AT)
            code = entry + header
            if kind not in (1, 2) or not _CARD_AT < header <= 4096 or code + length > end:
                break
            found[of] += length
            if of != card:
                data[code : code + length] = bytes(length)
            entry = code + length
        at = data.find(MAGIC, end)
    return found


def _end(data: bytearray, at: int) -> int | None:
    """Return where the container at `at` ends; None where it is none."""
    if at + _CONTAINER > len(data):
        return None
    version, header, length = struct.unpack_from("<HHQ", data, at + 4)
    end = at + _CONTAINER + length
    return end if (version, header) == (1, _CONTAINER) and end <= len(data) else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", type=Path)
    parser.add_argument("--sm", type=int, default=90, help="the card to keep (default: %(default)s)")
    args = parser.parse_args()
    for path in args.libraries:
        data = bytearray(path.read_bytes())
        found = blank_other_cards(data, args.sm)
        if not found[args.sm]:
            print(f"{path}: no code for sm_{args.sm}; left as it is", file=sys.stderr)
            return 1
        path.write_bytes(data)
        kept, all_of_it = found[args.sm] / 1e6, sum(found.values()) / 1e6
        print(f"{path.name}: {kept:.0f} of {all_of_it:.0f} MB of GPU code kept (sm_{args.sm})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
