"""The coordinator's queues: the alarm in the notes and the metrics, and its end."""

from __future__ import annotations

from cloud_stub.queue_watch import QueueWatch
from protocol.events import QueueSampled
from protocol.exposition import Exposition


def sampled(waiting: int) -> QueueSampled:
    return QueueSampled(at_s=0.0, name="tails", waiting=waiting, running=1, capacity=40, outcome="queued")


def test_a_queue_that_grows_on_an_idle_machine_is_noted_and_forgotten() -> None:
    metrics, now = Exposition(), [0.0]
    watch = QueueWatch(metrics, lambda: 0.8, lambda: now[0])
    for waiting in range(10, 16):
        now[0] += 1.0
        watch(sampled(waiting))
        watch.look()
    assert watch.notes == [
        "the queue of tails and whole models (tails) grows while the CPU is idle: 15 wait, 80 % idle"
    ]
    assert metrics.value("midstream_queue_stalled", queue="tails") == 1
    assert metrics.value("midstream_queue_waiting", queue="tails") == 15
    watch(sampled(0))
    for _ in range(10):
        now[0] += 1.0
        watch.look()
    assert watch.notes == []
    assert metrics.value("midstream_queue_stalled", queue="tails") == 0
