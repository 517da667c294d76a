"""What rank 0 sends and receives to save and load does not grow with ranks, but where a whole tensor comes to it."""

from __future__ import annotations

from benchmarks.checkpoint.growth_with_ranks import counted

_ALIKE = ("save_safetensors", "load_safetensors", "stream to all", "mirrored: after_step")
_WHOLE_ON_ONE = ("save_safetensors", "stream to rank 0")  # a message from each rank
_BYTES_OF_A_RANK = 5 * 8  # that a mirror asks of each rank when a job restarts


def test_messages_of_saves_and_loads_do_not_grow_with_ranks() -> None:
    names = {*_ALIKE, *_WHOLE_ON_ONE, "mirrored: restart"}
    few, many = (counted(num_ranks, names) for num_ranks in (4, 32))
    grown = {name: many[name].messages - few[name].messages for name in names}
    of_shards = {name: grown.pop(name) for name in _WHOLE_ON_ONE}
    assert grown == dict.fromkeys(grown, 0)
    assert all(count > 0 and count % (32 - 4) == 0 for count in of_shards.values())
    assert [each.requests for each in many.values()] == [each.requests for each in few.values()]
    for name in _ALIKE:
        assert many[name].nbytes == few[name].nbytes < 1000, name
    restart = [each["mirrored: restart"].nbytes for each in (few, many)]
    assert restart[1] - restart[0] == (32 - 4) * _BYTES_OF_A_RANK
