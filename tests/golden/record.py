"""`python -m tests.golden.record`: writes the golden files anew."""

from __future__ import annotations

import os
import sys

import pytest

if __name__ == "__main__":
    os.environ["CLAWLOOP_RECORD_GOLDEN"] = "1"
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/golden/test_golden.py"]))
