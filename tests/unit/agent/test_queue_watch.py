"""From a stuck executor to the warning, the metric and the doctor's finding, and back."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from agent.doctor import check_running, exit_code
from agent.health import Health
from agent.queue_watch import QueueWatch
from engines.executor import BoundedExecutor
from protocol.errors import LinkError
from protocol.exposition import Exposition
from protocol.fanout import Fanout


def test_workers_that_wait_for_a_lock_are_told_apart_from_work() -> None:
    metrics, now = Exposition(), [0.0]
    health = Health(lambda: now[0])
    watch = QueueWatch(health, metrics, lambda: 0.9, lambda: now[0])
    executor = BoundedExecutor("pictures", 1, 60.0, emit=Fanout([metrics, watch.depths]), max_waiting=20)
    executor.call(lambda: None)
    lock, done = threading.Event(), threading.Semaphore(0)
    for _ in range(8):
        executor.submit(lock.wait, 10.0, on_done=lambda result, error: done.release())
    for _ in range(5):
        now[0] += 1.0
        watch.look()
    (warning,) = health.warnings
    assert warning.name == "queue_stalled:pictures"
    assert "grows while the CPU is idle" in warning.text
    assert "pre- and post-processing" in warning.text
    assert "7 wait, 90 % idle" in warning.text
    assert metrics.value("midstream_queue_stalled", queue="pictures") == 1
    assert metrics.value("midstream_cpu_idle_ratio") == 0.9
    findings = list(check_running(lambda: {"warnings": [{"text": warning.text, "next_step": warning.next_step}]}))
    assert [(f.level, f.text) for f in findings] == [("warning", warning.text)]
    assert exit_code(findings) == 3

    lock.set()
    assert all(done.acquire(timeout=5.0) for _ in range(8))
    executor.close()
    for _ in range(10):
        now[0] += 1.0
        watch.look()
    assert health.warnings == ()
    assert metrics.value("midstream_queue_stalled", queue="pictures") == 0


def test_the_doctor_speaks_of_the_agent_whether_it_runs_or_not() -> None:
    def absent() -> Mapping[str, object]:
        raise LinkError("nobody there")

    assert [f.level for f in check_running(absent)] == ["ok"]
    assert [f.level for f in check_running(lambda: {"warnings": []})] == ["ok"]
    assert [f.level for f in check_running(lambda: {"warnings": "what"})] == ["ok"]
