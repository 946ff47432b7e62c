"""The lanes of one consumer, one pack of each in turn."""

from __future__ import annotations

import pytest

from streampack import IterablePackedDataset, MapSource
from streampack.sources import Reading
from streampack.sources.base import Reader
from tests.support.corpus import Numbers


class Flaky(MapSource):
    """Cannot begin some lanes' epochs at first."""

    fails: frozenset[tuple[int, int]] = frozenset()  # epoch, lane

    def read(self, reading: Reading) -> Reader:
        if (reading.epoch, reading.lane) in self.fails:
            self.fails = self.fails - {(reading.epoch, reading.lane)}
            raise OSError("the disk is busy")
        return super().read(reading)


def packs_of(source: MapSource) -> tuple[list[tuple[int, int, list[int]]], int]:
    """Epoch, lane and tokens of all packs, and how many errors came in between."""
    data = IterablePackedDataset(source, max_seq_len=12, encoder=Numbers(), num_lanes=3, epochs=3)
    stream, found, errors = None, [], 0
    while True:
        try:
            stream = stream or data.stream()
            pack = next(stream)
        except StopIteration:
            return found, errors
        except OSError:
            errors += 1
            continue
        found.append((pack.epoch, pack.lane, pack.tokens.tolist()))


@pytest.mark.parametrize("longest", range(3))
@pytest.mark.parametrize("lane", range(3))
def test_an_epoch_that_cannot_begin_begins_when_asked_again(lane: int, longest: int) -> None:
    """No lane's rows are passed by, and all come in the same order, whichever lane has the most packs."""
    data = [{"i": i, "n": 12 if i % 3 == longest else 3} for i in range(20)]
    whole, _ = packs_of(MapSource(data))
    flaky = Flaky(data)
    flaky.fails = frozenset({(0, 2), (1, lane), (2, lane)})
    assert packs_of(flaky) == (whole, 3)
