"""DCGM's readiness check (`dcgmi diag -r 1`), read from its JSON or its table and judged.

Formats: DCGM 3 writes `{"DCGM GPU Diagnostic": {"test_categories": [{"tests": [{"name", "results": [{"gpu_ids",
"status", "warnings"}]}]}]}}`, DCGM 4 `{"DCGM Diagnostic": ...}` with `entity_id` in place of `gpu_ids` and a list of
warnings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ext.preflight.findings import Finding

COMMAND = ("dcgmi", "diag", "-r", "1", "--fail-early", "-j")
RESULTS = frozenset({"pass", "fail", "warn", "skip"})
REMEDY = "take the node out and keep this output; in a maintenance window `dcgmi diag -r 2` tells more"


@dataclass(frozen=True)
class DcgmTest:
    """One test of one node: its name, "pass", "fail", "warn" or "skip", the GPUs named, and what DCGM said."""

    name: str
    result: str
    gpus: str
    message: str


def parse_dcgm(text: str) -> list[DcgmTest]:
    """Return the tests in DCGM's order; an empty list where the text holds none."""
    start = text.find("{")
    if start >= 0:
        try:
            return list(_from_json(json.JSONDecoder().raw_decode(text[start:])[0]))
        except ValueError:
            return []
    return _from_table(text)


def judge_dcgm(node: str, text: str | None) -> Finding:
    """Judge one node's output; None means that DCGM is not installed."""
    if text is None:
        return Finding("DCGM level 1", node, "skipped", "dcgmi is not installed here")
    tests = parse_dcgm(text)
    ran = [test for test in tests if test.result != "skip"]
    if not ran:
        last = text.strip().splitlines()[-1] if text.strip() else "no output"
        return Finding(
            "DCGM level 1", node, "unknown", last[:120], "no test result in the output",
            "start the host engine (nv-hostengine) on the node and run `dcgmi diag -r 1` by hand",
        )  # fmt: skip
    for result, status in (("fail", "bad"), ("warn", "warning")):
        found = [test for test in ran if test.result == result]
        if found:
            value = "; ".join(_said(test) for test in found)
            return Finding("DCGM level 1", node, status, value, f"{len(ran)} tests", REMEDY)  # type: ignore[arg-type]
    return Finding("DCGM level 1", node, "good", f"{len(ran)} tests passed")


def _said(test: DcgmTest) -> str:
    gpus = f" (GPU {test.gpus})" if test.gpus else ""
    return f"{test.name} {test.result}{gpus}{': ' + test.message if test.message else ''}"


def _from_json(plain: Any) -> Iterator[DcgmTest]:
    root: dict[str, Any] = (
        next((value for key, value in plain.items() if "Diagnostic" in key), {}) if isinstance(plain, dict) else {}
    )
    for category in root.get("test_categories", []):
        for test in category.get("tests", []):
            for result in test.get("results", []):
                gpus = result.get("gpu_ids", result.get("gpu_id", result.get("entity_id", "")))
                yield DcgmTest(
                    test.get("name", "?"),
                    _result(result.get("status", "")),
                    str(gpus),
                    _message(result.get("warnings")),
                )


def _message(warnings: Any) -> str:
    if isinstance(warnings, list):
        return "; ".join(str(w.get("warning", w)) if isinstance(w, dict) else str(w) for w in warnings)
    return str(warnings or "")


def _result(word: str) -> str:
    lower = word.strip().lower()
    return next((result for result in sorted(RESULTS) if lower.startswith(result)), "fail")


def _from_table(text: str) -> list[DcgmTest]:
    tests: list[DcgmTest] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 2 or not cells[1]:
            continue
        name, value = cells
        word, _, rest = value.partition(" - ")
        if word.strip().lower() in RESULTS:
            tests.append(DcgmTest(name, word.strip().lower(), rest.replace("GPU:", "").strip(), ""))
        elif tests and name in ("", "Warning", "Error", "Info"):
            last = tests[-1]
            message = f"{last.message} {value}".strip()
            tests[-1] = DcgmTest(last.name, last.result, last.gpus, message)
    return tests
