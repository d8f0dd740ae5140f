"""The one error that people see: what went wrong, where, why we think so, and what to do next.

Commands print it without a traceback and exit with its code; a traceback means a fault of ours.
"""

from __future__ import annotations


class UserError(ValueError):
    """An expected failure that the user can mend.

    Args:
        what: One sentence, what went wrong.
        where: The file, flag, rank or tensor it is about, with the value met.
        why: Why we think so. Empty when `what` already says it.
        remedy: What to do next, a command where there is one.
        exit_code: The process's exit status (default 1; 64 for wrong usage).
    """

    def __init__(
        self, what: str, *, where: str = "", why: str = "", remedy: str, exit_code: int = 1
    ) -> None:
        self.what = what
        self.where = where
        self.why = why
        self.remedy = remedy
        self.exit_code = exit_code
        super().__init__(self.text())

    def text(self) -> str:
        """Return the message as printed: one line a part, empty parts left out."""
        parts = [("error", self.what), ("where", self.where), ("why", self.why), ("try", self.remedy)]
        return "\n".join(f"{label + ':':<7}{part}" for label, part in parts if part)
