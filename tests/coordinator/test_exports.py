"""The public surface."""

from __future__ import annotations

import coordinator


def test_what_the_package_exports() -> None:
    assert sorted(coordinator.__all__) == coordinator.__all__
    for name in coordinator.__all__:
        assert getattr(coordinator, name).__doc__, name
