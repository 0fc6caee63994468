"""Batches over ZeroMQ, in the frames that routers of vLLM and Dynamo read.

    PUB      ->  topic | sequence | payload            every batch, to all who subscribe
    ROUTER   <-          "" | sequence                 "from this one on, please"
             ->  "" | sequence | payload               each that is still kept
             ->  "" | -1       | ""                    the end

Sequence numbers are 8 bytes, big-endian. A subscriber that lost a batch, or came late,
has what it missed replayed. What is kept no longer is told anew: the publisher's owner
calls `EventStream.restate` now and then, or when a follower asks. pyzmq comes with the
extra `jaxcache[events]`, and only this module needs it.
"""

import collections
import contextlib
import queue
import threading
from types import TracebackType
from typing import Self

import zmq

from jaxcache.events.mirror import Mirror, SequenceGap
from jaxcache.events.records import AllCleared, Batch, decode_batch, encode_batch
from jaxcache.layouts.arguments import boolean, check_kind, check_name, integer

END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""

# How long the publisher's thread sleeps at most before it looks for replays wanted.
_TICK_S = 0.02
_HIGH_WATER = 100_000


class _Closing:
    """Something that `with` closes."""

    def __enter__(self) -> Self:
        """Returns itself, to be closed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Closes it."""
        self.close()

    def close(self) -> None:
        """Gives back what it has opened."""
        raise NotImplementedError


class Publisher(_Closing):
    """Sends batches from a thread of its own, and replays the last ones.

    `publish` never waits: the step that published must not be held up by a router.

    Attributes:
        num_skipped: Batches that found no room in the queue. Whoever follows sees the
            gap.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        kept_batches: int = 10_000,
        max_queued: int = 100_000,
        only_pages: bool = False,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Binds the sockets, and begins to serve.

        Args:
            endpoint: Where to publish, for example `tcp://*:5557`.
            replay_endpoint: Where to replay; nowhere if `None`.
            topic: Goes before every batch.
            kept_batches: How many of the last batches can be replayed.
            max_queued: How many may wait to be sent.
            only_pages: Whether to leave out snapshots and begun pages, for readers that
                refuse events they do not know.
            context: Whose sockets to use; needed for `inproc://` endpoints.

        Raises:
            ValueError: naming the argument, if a value makes no sense.
            zmq.ZMQError: if an endpoint cannot be bound.
        """
        check_name("topic", topic)
        kept_batches = integer("kept_batches", kept_batches, 0)
        max_queued = integer("max_queued", max_queued, 1)
        self.num_skipped = 0
        self._topic = topic.encode()
        self._only_pages = boolean("only_pages", only_pages)
        self._queue: queue.Queue[Batch | None] = queue.Queue(max_queued)
        self._kept: collections.deque[tuple[bytes, bytes]] = collections.deque(
            maxlen=kept_batches
        )
        self._is_closing = threading.Event()
        context = zmq.Context.instance() if context is None else context
        with contextlib.ExitStack() as stack:
            self._pub = stack.enter_context(context.socket(zmq.PUB))
            self._pub.set_hwm(_HIGH_WATER)
            self._pub.setsockopt(zmq.LINGER, 1000)
            self._pub.bind(endpoint)
            self._router: zmq.Socket[bytes] | None = None
            if replay_endpoint is not None:
                self._router = stack.enter_context(context.socket(zmq.ROUTER))
                self._router.setsockopt(zmq.LINGER, 1000)
                # A follower that does not read must not stop the thread.
                self._router.setsockopt(zmq.SNDTIMEO, 1000)
                self._router.bind(replay_endpoint)
            self._sockets = stack.pop_all()
        self._thread = threading.Thread(
            target=self._serve, name="jaxcache-events", daemon=True
        )
        self._thread.start()

    def publish(self, batch: Batch | None) -> None:
        """Queues a batch to be sent; does nothing for `None`.

        Raises:
            ValueError: if the publisher was closed, or `batch` is none.
        """
        if self._is_closing.is_set():
            raise ValueError("the publisher was closed")
        if batch is None:
            return
        check_kind("batch", batch, Batch)
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            self.num_skipped += 1

    def close(self) -> None:
        """Sends what is queued and closes the sockets. Does nothing the second time."""
        if not self._is_closing.is_set():
            self._is_closing.set()
            with contextlib.suppress(queue.Full):
                self._queue.put_nowait(None)
        self._thread.join()

    def _serve(self) -> None:
        with self._sockets:
            while True:
                try:
                    batch = self._queue.get(timeout=_TICK_S)
                except queue.Empty:
                    batch = None
                if batch is not None:
                    self._send(batch)
                elif self._is_closing.is_set() and self._queue.empty():
                    return
                self._replay()

    def _send(self, batch: Batch) -> None:
        sequence = batch.sequence.to_bytes(8, "big")
        payload = encode_batch(batch, only_pages=self._only_pages)
        self._kept.append((sequence, payload))
        self._pub.send_multipart((self._topic, sequence, payload))

    def _replay(self) -> None:
        router = self._router
        while router is not None and router.poll(0):
            who, *frames = router.recv_multipart()
            if len(frames) != 2 or frames[0] or len(frames[1]) != 8:
                continue
            # Big-endian numbers of one width are ordered as their bytes are.
            wanted = [kept for kept in self._kept if kept[0] >= frames[1]]
            with contextlib.suppress(zmq.Again):
                for sequence, payload in (*wanted, (END, b"")):
                    router.send_multipart((who, b"", sequence, payload))


class Subscriber(_Closing):
    """Keeps a mirror up to date with one publisher, and closes gaps by replay.

    Attributes:
        mirror: What the publisher's manager could restore.
        num_replays: How often batches were asked for again.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        """Connects to a publisher; the arguments are those that it has."""
        self.mirror = Mirror()
        self.num_replays = 0
        context = zmq.Context.instance() if context is None else context
        self._sub = context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.set_hwm(_HIGH_WATER)
        self._sub.connect(endpoint)
        self._sub.subscribe(topic)
        self._context = context
        self._replay_endpoint = replay_endpoint

    def receive(self, timeout_s: float = 0.0) -> int:
        """Applies the batches that have come.

        Args:
            timeout_s: How long to wait for the first one.

        Returns:
            How many were applied, replayed ones included.

        Raises:
            SequenceGap: if batches are missing that cannot be replayed. The mirror is
                as it was before them, and follows again from the next batch that begins
                with `AllCleared`.
            ValueError: if a payload is no batch.
        """
        applied = 0
        timeout_ms = int(1000 * timeout_s)
        while self._sub.poll(timeout_ms):
            _, sequence, payload = self._sub.recv_multipart()
            number = int.from_bytes(sequence, "big")
            applied += self._take(decode_batch(number, payload))
            timeout_ms = 0
        return applied

    def catch_up(self, timeout_s: float = 1.0) -> int:
        """Has the batches replayed that the mirror lacks, as one that comes late does.

        Args:
            timeout_s: How long to wait for each.

        Returns:
            How many were applied; 0 also where nobody answers.

        Raises:
            SequenceGap: if the first ones are kept no longer, and none begins anew.
        """
        expected = self.mirror.expected
        batches = self._replayed(expected or 0, timeout_s)
        if batches and batches[0].sequence != expected:
            anew = [index for index, batch in enumerate(batches) if _is_anew(batch)]
            if not anew:
                raise SequenceGap(expected, batches[0].sequence)
            batches = batches[anew[-1] :]
        for batch in batches:
            self.mirror.apply(batch)
        return len(batches)

    def close(self) -> None:
        """Closes the socket."""
        self._sub.close()

    def _take(self, batch: Batch) -> int:
        expected = self.mirror.expected
        if expected is not None and batch.sequence < expected and not _is_anew(batch):
            # A replay has brought it already.
            return 0
        try:
            self.mirror.apply(batch)
        except SequenceGap:
            applied = self.catch_up()
            expected = self.mirror.expected
            if expected is None or expected <= batch.sequence:
                raise
            return applied
        return 1

    def _replayed(self, first: int, timeout_s: float) -> list[Batch]:
        if self._replay_endpoint is None:
            return []
        self.num_replays += 1
        batches = []
        with self._context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._replay_endpoint)
            dealer.send_multipart((b"", first.to_bytes(8, "big")))
            while dealer.poll(int(1000 * timeout_s)):
                _, sequence, payload = dealer.recv_multipart()
                if sequence == END:
                    break
                number = int.from_bytes(sequence, "big")
                batches.append(decode_batch(number, payload))
        return batches


def _is_anew(batch: Batch) -> bool:
    return bool(batch.events) and isinstance(batch.events[0], AllCleared)
