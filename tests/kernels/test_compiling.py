from __future__ import annotations

import threading
from pathlib import Path

import numba
import pytest

from holdfast.kernels import compiling
from holdfast.kernels.compiling import in_turn
from tests.other_user import CAN_BE_ANOTHER, folder_of_everybody, tries_to_lock


def test_one_at_a_time() -> None:
    """Threads stand for processes: each opens the lock for itself."""
    inside, done = threading.Event(), threading.Event()
    order: list[str] = []

    def second() -> None:
        inside.wait()
        with in_turn():
            order.append("second")
        done.set()

    thread = threading.Thread(target=second)
    thread.start()
    with in_turn():
        inside.set()
        assert not done.wait(0.3), "it did not wait"
        order.append("first")
    thread.join()
    assert order == ["first", "second"]
    assert done.is_set()


@pytest.mark.parametrize("where", ["package", "numba's folder", "nowhere"])
def test_no_other_user_can_make_us_wait(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """They can read what is installed: if they could lock it, every start would take a minute."""
    with folder_of_everybody() as folder:
        places = [folder / "a", folder / "b"]
        for place in places:
            place.mkdir()
        if where != "package":
            (places[0] / "compiling.lock").mkdir()  # it cannot be opened there
        if where == "nowhere":
            (places[1] / "compiling.lock").mkdir()
        monkeypatch.setattr(compiling, "_folders", lambda: places)
        with in_turn():
            pass
        for place in places:
            lock = place / "compiling.lock"
            assert not lock.is_file() or lock.stat().st_mode & 0o777 == 0o600
        assert [(place / "compiling.lock").is_file() for place in places] == [
            where == "package",
            where == "numba's folder",
        ]


@pytest.mark.skipif(not CAN_BE_ANOTHER, reason="takes root, to become another user")
def test_another_user_who_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    with folder_of_everybody() as folder:
        monkeypatch.setattr(compiling, "_folders", lambda: [folder])
        monkeypatch.setattr(compiling, "_MOST_SECONDS", 1e9)
        with in_turn():
            pass
        with (
            tries_to_lock(folder) as has_the_folder,
            tries_to_lock(folder / "compiling.lock") as has_the_file,
        ):
            assert (has_the_folder, has_the_file) == (True, False)
            with in_turn():
                pass


def test_it_is_where_numba_keeps_what_it_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = Path(compiling.__file__).parent / "__pycache__"
    assert compiling._folders()[0] == here
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compiling._folders()[0] == tmp_path
