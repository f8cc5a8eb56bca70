"""The number of examples of a property: the whole number where slow tests run, too, and a part in ``make test``."""

from __future__ import annotations

runs_slow_tests = True  # ``conftest.py`` sets it before test files are imported


def examples(number: int, quick: int | None = None) -> int:
    """Return the number of examples for ``@settings(max_examples=examples(60))``.

    ``number``: examples where slow tests run. ``quick``: examples elsewhere; ``None``: a quarter of ``number``.
    """
    if runs_slow_tests:
        return number
    return max(1, number // 4) if quick is None else quick
