"""Batches over ZeroMQ: what is published arrives, and what was lost is replayed."""

import pathlib
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from jaxcache.events.mirror import Mirror, SequenceGap
from jaxcache.events.publisher import END, Publisher, Subscriber
from jaxcache.events.records import Batch, decode_batch
from jaxcache.events.stream import EventStream
from tests.events.following import contents
from tests.host.caches import make_manager
from tests.host.driver import Driver

Context = zmq.Context[zmq.Socket[bytes]]
PATIENCE_S = 10.0


@pytest.fixture
def context() -> Iterator[Context]:
    with zmq.Context() as context:
        yield context


@pytest.fixture(params=["inproc", "ipc"])
def endpoints(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> list[str]:
    if request.param == "inproc":
        return ["inproc://events", "inproc://replays"]
    return [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"]


class Served:
    """A manager that serves prompts, and its stream."""

    def __init__(self) -> None:
        self.driver = Driver(make_manager("hybrid"))
        self.stream: EventStream = self.driver.manager.listen()
        self.number = 0

    def batch(self) -> Batch:
        """Serves one more prompt, and returns what that told."""
        self.number += 1
        self.driver.serve(self.number, [self.number, *range(40)])
        batch = self.stream.take()
        assert batch is not None
        return batch


def until(is_done: Callable[[], bool]) -> None:
    """Waits for another thread."""
    end = time.monotonic() + PATIENCE_S
    while not is_done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def joined(publisher: Publisher, subscriber: Subscriber, served: Served) -> None:
    """Publishes until the subscription, which takes its time, has reached it."""

    def has_come() -> bool:
        publisher.publish(served.batch())
        return subscriber.receive(0.05) > 0

    until(has_come)
    catch_up_with(subscriber, served.number - 1)


def catch_up_with(subscriber: Subscriber, sequence: int) -> None:
    def is_there() -> bool:
        subscriber.receive(0.05)
        return subscriber.mirror.expected == sequence + 1

    until(is_there)


def mirrored(subscriber: Subscriber) -> object:
    return contents(subscriber.mirror)


def told_anew(served: Served) -> object:
    """What a mirror should hold."""
    served.stream.restate()
    batch = served.stream.take()
    assert batch is not None
    mirror = Mirror()
    mirror.apply(batch)
    return contents(mirror)


def test_what_is_published_arrives(context: Context, endpoints: list[str]) -> None:
    served = Served()
    with (
        Publisher(*endpoints, context=context) as publisher,
        Subscriber(*endpoints, context=context) as subscriber,
    ):
        joined(publisher, subscriber, served)
        for _ in range(3):
            publisher.publish(batch := served.batch())
        publisher.publish(None)
        catch_up_with(subscriber, batch.sequence)
        assert subscriber.mirror.restorable([1, *range(50)]) == 41
        assert mirrored(subscriber) == told_anew(served)


def test_a_subscriber_that_comes_late_has_all_replayed(
    context: Context, endpoints: list[str]
) -> None:
    served = Served()
    with Publisher(*endpoints, context=context) as publisher:
        for _ in range(5):
            publisher.publish(served.batch())
        until(lambda: len(publisher._kept) == 5)
        with Subscriber(*endpoints, context=context) as subscriber:
            assert subscriber.catch_up() == 5
            assert subscriber.catch_up() == 0
            assert mirrored(subscriber) == told_anew(served)


def test_a_late_subscriber_begins_where_all_was_told_anew(context: Context) -> None:
    endpoints = ["inproc://events", "inproc://replays"]
    served = Served()
    with Publisher(*endpoints, kept_batches=3, context=context) as publisher:
        for number in range(4):
            if number == 2:
                served.stream.restate()
            publisher.publish(batch := served.batch())
        last = batch.sequence.to_bytes(8, "big")
        until(lambda: len(publisher._kept) == 3 and publisher._kept[-1][0] == last)
        with Subscriber(*endpoints, context=context) as subscriber:
            assert subscriber.catch_up() == 2
            assert mirrored(subscriber) == told_anew(served)


def test_a_gap_is_closed_by_replay(context: Context, endpoints: list[str]) -> None:
    served = Served()
    with (
        Publisher(*endpoints, context=context) as publisher,
        Subscriber(*endpoints, context=context) as subscriber,
    ):
        joined(publisher, subscriber, served)
        replays = subscriber.num_replays
        # Two batches are kept, but lost on the way.
        subscriber._sub.unsubscribe("")
        time.sleep(0.1)
        for _ in range(2):
            publisher.publish(served.batch())
        last = served.number - 1
        until(lambda: publisher._kept[-1][0] == last.to_bytes(8, "big"))
        subscriber._sub.subscribe("")
        time.sleep(0.1)
        publisher.publish(batch := served.batch())
        catch_up_with(subscriber, batch.sequence)
        assert subscriber.num_replays == replays + 1
        assert mirrored(subscriber) == told_anew(served)


def test_a_gap_that_cannot_be_closed_is_refused_until_all_is_told_anew(
    context: Context,
) -> None:
    endpoints = ["inproc://events", "inproc://replays"]
    served = Served()
    with (
        Publisher(*endpoints, kept_batches=1, context=context) as publisher,
        Subscriber(*endpoints, context=context) as subscriber,
    ):
        joined(publisher, subscriber, served)
        before = mirrored(subscriber)
        lost = served.batch()
        publisher.publish(served.batch())
        with pytest.raises(SequenceGap, match=f"batches {lost.sequence} to"):
            until(lambda: subscriber.receive(0.05) > 0)
        assert mirrored(subscriber) == before
        served.stream.restate()
        batch = served.stream.take()
        publisher.publish(batch)
        assert batch is not None
        catch_up_with(subscriber, batch.sequence)
        assert mirrored(subscriber) == told_anew(served)


def test_frames_are_those_that_routers_read(context: Context) -> None:
    endpoints = ["inproc://events", "inproc://replays"]
    served = Served()
    with (
        context.socket(zmq.SUB) as sub,
        context.socket(zmq.REQ) as req,
        Publisher(*endpoints, topic="kv", context=context) as publisher,
    ):
        sub.connect(endpoints[0])
        sub.subscribe("kv")

        def has_come() -> bool:
            publisher.publish(served.batch())
            return sub.poll(50) > 0

        until(has_come)
        topic, sequence, payload = sub.recv_multipart()
        assert topic == b"kv"
        assert len(sequence) == 8
        number = int.from_bytes(sequence, "big")
        assert decode_batch(number, payload).sequence == number
        # What is no request is passed over; a request from the future has an empty
        # answer. `REQ` adds and takes the empty frame by itself.
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoints[1])
            dealer.send_multipart((b"nonsense",))
            dealer.send_multipart((b"", b"short"))
            dealer.send_multipart((b"", (1 << 40).to_bytes(8, "big")))
            assert dealer.poll(5000)
            assert dealer.recv_multipart() == [b"", END, b""]
        req.connect(endpoints[1])
        req.send(number.to_bytes(8, "big"))
        assert req.poll(5000)
        assert req.recv_multipart() == [sequence, payload]


def test_publishing_never_waits_and_counts_what_found_no_room(
    context: Context,
) -> None:
    served = Served()
    publisher = Publisher("inproc://events", max_queued=1, context=context)
    batch = served.batch()
    for _ in range(2000):
        publisher.publish(batch)
    assert publisher.num_skipped > 0
    publisher.close()
    publisher.close()
    with pytest.raises(ValueError, match="was closed"):
        publisher.publish(batch)


def test_an_endpoint_in_use_is_refused_at_once(context: Context) -> None:
    with Publisher("inproc://events", context=context):
        with pytest.raises(zmq.ZMQError, match="in use"):
            Publisher("inproc://other", "inproc://events", context=context)

        def is_free() -> bool:
            try:
                Publisher("inproc://other", context=context).close()
            except zmq.ZMQError:
                return False
            return True

        # The socket that was bound before is closed again; ZeroMQ takes its time.
        until(is_free)
    with pytest.raises(ValueError, match="max_queued must be an integer >= 1, got 0"):
        Publisher("inproc://events", max_queued=0, context=context)
    with pytest.raises(
        ValueError, match="kept_batches must be an integer >= 0, got -1"
    ):
        Publisher("inproc://events", kept_batches=-1, context=context)
