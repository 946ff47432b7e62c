"""Round robin over the lanes of one consumer."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from streampack.accounting import Ledger, nothing_to_pack
from streampack.lanes.lane import Lane
from streampack.lanes.lane_config import LaneConfig
from streampack.lanes.lane_state import LaneEvent, Snapshot
from streampack.storage.prefetch import SOON, Prefetch


def open_lanes(
    config: LaneConfig,
    lanes: range,
    *,
    num_lanes: int,
    states: Mapping[int, Snapshot],
    first_epoch: Callable[[int], int],
    prefetch: int,
) -> Iterator[Lane]:
    """Open lanes at their states; one that has none, or has ended an epoch before, begins ``first_epoch(lane)``."""
    each = Prefetch.for_lanes(prefetch, len(lanes))
    for lane in lanes:
        yield Lane(
            config,
            lane=lane,
            num_lanes=num_lanes,
            state=states.get(lane),
            first_epoch=first_epoch(lane),
            prefetch=each,
        )


def round_robin(lanes: Iterable[Lane], *, last_epoch: int | None, alone: bool) -> Generator[LaneEvent]:
    """Yield the packs of some lanes in round robin, epoch after epoch, and the ends of their epochs.

    The next lane is the one with the fewest packs in this epoch, of equals the one with the lowest number. So the order
    follows from the lanes, and a state needs nothing besides theirs.

    Args:
        lanes: are opened and restored when the first event is asked for.
        last_epoch: the epoch after which the stream ends; None if it never does.
        alone: whether these are all the lanes of the run; then a run without a pack is an error.
    """
    lanes = list(lanes)
    # Lanes that continue an earlier run may have nothing left of this epoch.
    alone = alone and not any(lane.resumes_from.restart for lane in lanes if lane.resumes_from)
    _restore([lane for lane in lanes if lane.resumes_from is not None])
    fetches = any(not lane.config.source.local for lane in lanes[:1])
    place = {lane.lane: i for i, lane in enumerate(lanes)}
    # The lane with the smallest key is next. Lanes that are done come last in their epoch: if one of them is next, the
    # epoch is over.
    key = ("done", "packs", "lane")
    key_of = attrgetter(*key) if last_epoch is None else attrgetter("epoch", *key)
    while lanes:
        heap = sorted((key_of(lane), lane) for lane in lanes)  # keys differ, so lanes are not compared
        for _, lane in heap[:SOON]:
            lane.prepare()
        while not (lane := heap[0][1]).done:
            if fetches:
                lanes[(place[lane.lane] + min(SOON, len(lanes) - 1)) % len(lanes)].prepare()
            event = lane.next_event()
            heapq.heapreplace(heap, (key_of(lane), lane))
            yield event
        if alone and not any(each.ledger.packs for each in lanes):
            break
        if last_epoch is None or lane.epoch >= last_epoch:
            return
        epoch = lane.epoch
        for ended in lanes:
            if ended.epoch == epoch:
                ended.start_epoch(epoch + 1)
    if alone:
        raise nothing_to_pack(Ledger.total(each.ledger for each in lanes))


def _restore(lanes: Sequence[Lane]) -> None:
    """Restore lanes from their states, with the rows that waited in all of them: those of one file are read at once."""
    for lane in lanes[:SOON]:
        lane.prepare()  # what lanes read next is fetched beside the rows that waited
    ids = list(dict.fromkeys(row_id for lane in lanes for row_id in lane.waiting_rows()))
    try:
        config = lanes[0].config if ids else None
        rows = dict(zip(ids, config.source.fetch_many(ids), strict=True)) if config else {}
    except (ValueError, LookupError, StopIteration) as error:
        why = error if isinstance(error, ValueError) else "it is not there; the data changed"
        raise ValueError(
            f"a row that waited to be packed when the state was made cannot be read again: {why}"
        ) from error
    for lane in lanes:
        lane.restore(rows)
