"""Sizes as people write them."""

from __future__ import annotations

from fsdp2.extras.sizes import nbytes_of, text_of


def test_sizes_are_read_and_shown() -> None:
    for size, expected in (("70GiB", 70 * 2**30), ("80 gb", 80 * 10**9), (5, 5), ("1.5KiB", 1536)):
        assert nbytes_of(size, "budget", "70GiB") == expected
    for nbytes, shown in ((70.8 * 2**30, "70.8 GiB"), (2**20, "1.0 MiB"), (1024, "1.0 KiB")):
        assert text_of(nbytes) == shown
