"""Files that others have written: none hangs a call, exhausts the stack, or sends control characters to a terminal."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fsdp2.extras.foreign_files import is_inside, json_of, printable, read_json

BAD = {"deep": "[" * 100_000, "surrogate": '["\\ud800"]', "key": '{"\\udfff": 1}', "cut": '{"a"', "huge": "9" * 5000}


@pytest.mark.parametrize("name", BAD)
def test_json_that_cannot_be_used_is_a_value_error(name: str, tmp_path: Path) -> None:
    expected = "nested too deeply|surrogates not allowed|Expecting|Exceeds the limit"
    with pytest.raises(ValueError, match=expected):
        json_of(BAD[name])
    (tmp_path / name).write_text(BAD[name])
    with pytest.raises(ValueError, match=expected):
        read_json(tmp_path / name)


def test_what_would_block_or_never_end_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for path in (tmp_path / "fifo", tmp_path / "link", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match=r"no regular file|Is a directory"):
            read_json(path)
    (tmp_path / "file").write_text('{"a": [1]}')
    (tmp_path / "link").unlink()
    (tmp_path / "link").symlink_to("file")  # as in the cache of a hub
    assert read_json(tmp_path / "link") == {"a": [1]}


def test_control_characters_are_escaped_and_lines_stay() -> None:
    assert printable("a\n\x1b[31m\x07\u202e\ud800é 語") == "a\n\\x1b[31m\\x07\\u202e\\ud800é 語"


def test_names_in_an_index_stay_in_its_folder() -> None:
    assert all(map(is_inside, ("model.safetensors", "part/model.safetensors", "a..b")))
    assert not any(map(is_inside, ("../a", "a/../../b", "/a", "", "a\0", 3, None)))
