"""Pages in front of the log's tail are asked for before the writer needs them."""

import pytest

from raymq.store.base.files import Files
from raymq.store.log.segments.mapped_file_queue import MappedFileQueue
from raymq.store.log.segments.read_ahead import CHUNK_BYTES, WINDOW_BYTES, ReadAhead

FILE = WINDOW_BYTES + 2 * CHUNK_BYTES + 4096


class Asked(Files):
    """Remembers what was asked for."""

    def __init__(self):
        super().__init__()
        self.ranges = []
        self.opened = 0

    def open_file(self, path, *, create=False, writable=True):
        self.opened += 1
        return super().open_file(path, create=create, writable=writable)

    def read_ahead(self, fd, offset, length):
        self.ranges.append((offset, length))
        super().read_ahead(fd, offset, length)


class Tail:
    """The end of a log."""

    at = 0


@pytest.fixture
def log(tmp_path):
    files = Asked()
    queue = MappedFileQueue(tmp_path / "log", FILE, files=files)
    Tail.at = -1
    ahead = ReadAhead(queue, lambda: Tail.at, files=files)
    Tail.at = 0
    yield queue, ahead, files
    ahead.close()
    queue.close()


def work(ahead):
    steps = 0
    while ahead.step():
        steps += 1
    return steps


def test_a_tail_that_has_not_moved_needs_nothing(log):
    queue, ahead, files = log
    queue.create_next()
    Tail.at = -1
    assert work(ahead) == 0
    assert files.ranges == []


def test_without_a_file_there_is_nothing_to_ask_for(log):
    _, ahead, files = log
    assert work(ahead) == 0
    assert files.ranges == []


def test_a_window_in_front_of_the_tail_is_asked_for_once_and_moves_with_it(log):
    queue, ahead, files = log
    queue.create_next()
    assert work(ahead) == WINDOW_BYTES // CHUNK_BYTES
    assert work(ahead) == 0
    Tail.at = CHUNK_BYTES + 5
    assert work(ahead) == 2
    want = range(0, WINDOW_BYTES + 2 * CHUNK_BYTES, CHUNK_BYTES)
    assert files.ranges == [(at, CHUNK_BYTES) for at in want]


def test_it_ends_with_the_file_and_goes_on_with_the_next(log):
    queue, ahead, files = log
    queue.create_next()
    Tail.at = FILE - 4096
    assert work(ahead) == 1
    assert files.ranges == [(FILE - 4096, 4096)]
    queue.create_next()
    opened = files.opened
    assert work(ahead) == WINDOW_BYTES // CHUNK_BYTES
    assert files.ranges[1] == (0, CHUNK_BYTES)
    assert files.opened == opened + 1


def test_what_the_tail_has_passed_is_left_out(log):
    queue, ahead, files = log
    queue.create_next()
    work(ahead)
    files.ranges.clear()
    queue.create_next()
    Tail.at = FILE + CHUNK_BYTES + 5
    assert work(ahead) == WINDOW_BYTES // CHUNK_BYTES
    assert files.ranges[0] == (CHUNK_BYTES + 5, CHUNK_BYTES)
