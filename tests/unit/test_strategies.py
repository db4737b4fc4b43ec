"""The strategies that come along, without their libraries."""

from __future__ import annotations

import sys

import pytest

from oomrun_strategies.horovod import HorovodStrategy
from oomrun_strategies.single import SingleStrategy


def test_one_worker_has_no_group() -> None:
    assert SingleStrategy().group() is None


def test_without_horovod_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(SystemExit, match=r"tools/build_horovod\.py") as raised:
        HorovodStrategy().group()
    assert "Horovod cannot be imported" in str(raised.value)
