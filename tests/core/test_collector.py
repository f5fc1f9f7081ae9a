"""Imports go without a search for cycles, and what follows them has it as before."""

import gc
import sys

import pytest

from core import collector
from engine.worker.threads import uncollected
from gateway.cli.main import main


@pytest.mark.parametrize("pause", [collector.paused, uncollected])
@pytest.mark.parametrize("enabled", [True, False])
def test_a_pause_ends_as_it_began_also_where_an_import_fails(pause, enabled: bool) -> None:
    was = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(ImportError), pause():
            assert not gc.isenabled()
            raise ImportError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_a_command_is_imported_without_a_search_and_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[tuple[bool, int]] = []

    class Finder:
        def find_spec(self, name: str, path: object, target: object = None) -> None:
            if name == "gateway.admin.limits.command":
                seen.append((gc.isenabled(), gc.get_threshold()[0]))

    before = gc.get_threshold()
    monkeypatch.delitem(sys.modules, "gateway.admin.limits.command", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    with pytest.raises(SystemExit):
        main(["limit", "--help"])
    assert "usage: tollhouse limit" in capsys.readouterr().out
    assert seen == [(False, 20_000)]
    assert gc.isenabled() and gc.get_threshold() == before


def test_what_a_start_made_is_left_out_of_later_searches() -> None:
    before, kept = gc.get_threshold(), [object()]
    try:
        collector.spare_all()
        assert gc.get_freeze_count() > 1000
        assert not any(each is kept for each in gc.get_objects())
        assert gc.get_threshold() == (20_000, 20, 20)
    finally:
        gc.set_threshold(*before)
