"""`mpatch VERB`: the patch queue. Exit codes: 0 good, 1 a patch is wrong, 2 could not check, 64 usage."""

from __future__ import annotations

import sys

from tools.mpatch.cli import main

if __name__ == "__main__":
    sys.exit(main())
