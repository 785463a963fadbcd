"""Events for whoever traces: written only while the NIC's trace word asks for them."""

from ..ring.device import beat_last
from ..ring.layout import BEAT_EVENTS
from ..simt import device
from ..simt.vocabulary import clock_ns, i64, u64
from .state import EVENTS, TRACED, TRACING


@device
def publish_events(window, queue):
    """Let the tracer see what has happened so far. One lane, seldom: a release costs a microsecond."""
    if queue.count[TRACING] == 1:
        beat_last(window, BEAT_EVENTS, queue.count[EVENTS])


@device
def heed_tracer(window, queue):
    """Events are written from now on, or no more; those of before are counted first. One lane."""
    publish_events(window, queue)
    queue.count[TRACING] = queue.count[TRACED]


@device
def event(window, queue, kind, slot, value):
    """Something happens now. One lane."""
    if queue.count[TRACING] == 1:
        event_at(window, queue, clock_ns(), kind, slot, value)


@device
def event_at(window, queue, ns, kind, slot, value):
    """Something happened at `ns`; events are wanted. One lane."""
    n = i64(queue.count[EVENTS])
    at = n & (i64(window.event.shape[0]) - 1)
    window.event[at, 0] = u64(ns)
    window.event[at, 1] = (u64(kind) << u64(56)) | (u64(slot) << u64(40)) | (u64(value) & u64((1 << 40) - 1))
    queue.count[EVENTS] = n + 1
    if at & ((i64(window.event.shape[0]) >> 2) - 1) == 0:  # never many that a tracer does not know of
        publish_events(window, queue)
