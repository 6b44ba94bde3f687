"""The books of shared memory: no byte is granted twice, and every slab comes back when its last holder lets go."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from relax.queue.v1 import queue_pb2 as pb
from relax_common.errors import NotFound, Precondition
from relax_queue.rows.column_block import Column, decode, encode, layout
from relax_queue.transport.buffers import Buffers
from relax_queue.transport.frames import REQUEST_CHUNK, chunk_of, frames
from relax_queue.transport.shm.arena import GROWTH_BYTES, SLAB_HEAD_BYTES, Arena
from relax_queue.transport.shm.slabs import WRITE_SECONDS, Slabs
from relax_queue.transport.shm.space import Space, rounded

SIZE = 1 << 12


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1500), st.integers(0, 30)), max_size=60))
def test_space_never_gives_a_byte_twice_and_grows_together_again(steps: list[tuple[bool, int, int]]) -> None:
    space = Space()
    space.grow(SIZE)
    space.grow(SIZE)
    taken: dict[int, int] = {}
    for take, size, which in steps:
        if take or not taken:
            start = space.take(size)
            if start is None:
                assert space.largest_free() < rounded(size)
                continue
            assert start + rounded(size) <= space.n_bytes
            assert all(start >= s + n or start + rounded(size) <= s for s, n in taken.items())
            taken[start] = rounded(size)
        else:
            start = sorted(taken)[which % len(taken)]
            space.give_back(start, taken.pop(start))
        assert space.free_bytes == space.n_bytes - sum(taken.values())
    for start, n in taken.items():
        space.give_back(start, n)
    assert space.largest_free() == space.n_bytes == 2 * SIZE


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slabs(clock: Clock) -> Slabs:
    return Slabs(Arena(2 * GROWTH_BYTES), clock)


def test_a_put_goes_from_its_writer_to_the_state_and_its_unused_end_is_free(slabs: Slabs) -> None:
    session = slabs.begin(pid=1)
    slab, _ = slabs.grant(session, 1 << 20) or pytest.fail("an empty arena was full")
    used = slabs.arena.used_bytes
    assert len(slabs.written(session, slab.offset, slab.generation, 1000)) == 1000
    kept = slabs.adopt(session, slab.offset, 1000)
    assert (kept.size, kept.generation) == (rounded(1000), slab.generation)
    assert slabs.arena.used_bytes == used - (1 << 20) + rounded(1000)
    waiting, _ = slabs.grant(session, 1000) or pytest.fail("an empty arena was full")
    slabs.end(session.id)
    with pytest.raises(Precondition, match="is not granted"):
        slabs.written(session, waiting.offset, waiting.generation, 1000)
    assert slabs.arena.used_bytes > 64, "rows outlive their writer"
    slabs.release(kept)
    assert slabs.arena.used_bytes == 64


def test_a_slab_is_refused_after_its_time_for_another_session_and_for_too_many_bytes(
    slabs: Slabs, clock: Clock
) -> None:
    session, other = slabs.begin(pid=1), slabs.begin(pid=2)
    slab, seconds = slabs.grant(session, 1000) or pytest.fail("an empty arena was full")
    assert seconds == WRITE_SECONDS
    for holder, generation, size in (
        (other, slab.generation, 9),
        (session, slab.generation + 1, 9),
        (session, slab.generation, 2000),
    ):
        with pytest.raises(Precondition, match="slab"):
            slabs.written(holder, slab.offset, generation, size)
    clock.now = WRITE_SECONDS + 1
    with pytest.raises(Precondition, match="has run out"):
        slabs.written(session, slab.offset, slab.generation, 9)
    before = slabs.arena.used_bytes
    slabs.drop(session, [(slab.offset, slab.generation)] * 2)
    assert slabs.arena.used_bytes == before - SLAB_HEAD_BYTES - slab.size
    with pytest.raises(NotFound, match="attach again"):
        slabs.session(99)


def test_rows_stay_while_anyone_looks_at_them_and_not_after_their_process_has_ended(slabs: Slabs) -> None:
    stored = slabs.store(1000) or pytest.fail("an empty arena was full")
    one, two = slabs.begin(pid=1), slabs.begin(pid=2)
    for session in (one, one, two):
        slabs.show(session, stored)
    slabs.pin(stored)
    slabs.release(stored)
    slabs.release(stored)
    slabs.close_views(one, [stored.offset])
    slabs.end_process(2)
    slabs.end_process(2)
    assert slabs.arena.used_bytes > 64, "one view is left"
    slabs.close_views(one, [stored.offset, stored.offset, 12345])
    assert slabs.arena.used_bytes == 64
    assert slabs.n_sessions == 1


def test_a_full_arena_gives_nothing_and_goes_on_when_there_is_room() -> None:
    slabs = Slabs(Arena(GROWTH_BYTES))
    session = slabs.begin(pid=1)
    assert slabs.grant(session, GROWTH_BYTES) is None
    assert slabs.grant(session, GROWTH_BYTES // 2) is not None
    assert slabs.store(GROWTH_BYTES // 2) is None
    slabs.end(session.id)
    assert slabs.store(GROWTH_BYTES // 2) is not None
    assert Slabs(Arena(0)).store(1) is None, "no arena at all"


@given(st.lists(st.binary(max_size=70), max_size=6), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_raw_frames_are_the_wire_form_of_their_messages(buffers: list[bytes], size: int) -> None:
    sent = list(frames(buffers, REQUEST_CHUNK, size))
    assert b"".join(pb.PutRequest.FromString(frame).chunk for frame in sent) == b"".join(buffers)
    for frame in sent:
        assert chunk_of(frame, REQUEST_CHUNK) == pb.PutRequest.FromString(frame).chunk
        assert chunk_of(frame[:-1], REQUEST_CHUNK) is None
    assert chunk_of(pb.PutRequest(header=pb.PutHeader(run="r")).SerializeToString(), REQUEST_CHUNK) is None


def test_a_block_is_the_same_bytes_however_it_is_put_together() -> None:
    columns = {
        "a": Column("row", np.arange(7, dtype=np.int64), np.array([0, 3, 7])),
        "b": Column("row", np.ones((2, 5))),
    }
    whole = encode(columns)
    target = bytearray(b"\xff" * (len(whole) + 100))
    digest = layout(columns).write(memoryview(target))
    assert target[: len(whole)] == whole, "also in memory that held other bytes before"
    assert decode(target[: len(whole)], digest=digest).keys() == columns.keys()


def test_a_receive_buffer_is_used_again_once_nothing_refers_to_it() -> None:
    buffers = Buffers()
    first = buffers.take(2 << 20)
    array = np.frombuffer(first, np.int32)[10:20]
    address = np.frombuffer(first, np.uint8).ctypes.data
    del first
    other = buffers.take(2 << 20)
    assert np.frombuffer(other, np.uint8).ctypes.data != address, "an array still looks at it"
    del array
    assert np.frombuffer(buffers.take((2 << 20) - 64), np.uint8).ctypes.data == address
