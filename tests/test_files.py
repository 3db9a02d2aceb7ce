"""Files that a command leaves: refused before anything runs, and whole or not there at all."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from dmtp_kernels._files import check_file, replacing, write_text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.txt", "must end in .json"),
        (".json", "must end in .json"),
        ("missing/a.json", "must be a file in a directory that exists"),
        ("folder.json", "must be a file in a directory that exists"),
        ("loop.json", "must be a file in a directory that exists"),
        ("pipe.json", "must be a regular file"),
        ("a" * 251 + ".json", "its name must have at most 255 bytes"),
    ],
)
def test_a_bad_name_is_refused(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    (tmp_path / "loop.json").symlink_to("loop.json")
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(ValueError, match=f"^output: is {tmp_path / name}, {message}"):
        check_file("output", tmp_path / name, (".json",))


@pytest.mark.parametrize("name", ["a" * 250 + ".json", "\udcff.json", "old.json", "link.json", "dangling.json"])
def test_what_is_written_is_there(name: str, tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("old and longer")
    (tmp_path / "link.json").symlink_to("old.json")
    (tmp_path / "dangling.json").symlink_to("new.json")
    path = tmp_path / name
    check_file("output", path, (".json",))
    before = set(os.listdir(tmp_path))
    write_text("output", path, "new")
    assert path.read_text() == "new" and path.is_symlink() == (name in ("link.json", "dangling.json"))
    assert set(os.listdir(tmp_path)) == before | {"new.json" if name == "dangling.json" else name}


def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(ValueError, match=f"^output: cannot write {path}: File too large"):
            write_text("output", path, 2000 * "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    with pytest.raises(UnicodeEncodeError):
        write_text("output", path, "\ud800")
    with pytest.raises(KeyboardInterrupt), replacing("output", path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]
