"""Events become the metrics that a scraper reads."""

from __future__ import annotations

import re
import threading

from attrs import frozen

from protocol.events import (
    ArmSwitched,
    BudgetAlert,
    Event,
    HandedOver,
    LimitHit,
    LinkStateChanged,
    PolicyJudged,
    QueueSampled,
    SourceLost,
    TensorDone,
    TextDone,
    TransferSample,
)
from protocol.exposition import MAX_LABEL_CHARS, Exposition

LINE = re.compile(r'[a-z_]+(\{([a-z_]+="(\\.|[^"\\\n])*",?)+\})? (-?[0-9.e+-]+|NaN|[+-]Inf)')


def switch(model: str = "det", target: str = "cut:007:int8") -> ArmSwitched:
    return ArmSwitched(at_s=0, model=model, source="device", target=target, reason="faster")


def sample(outcome: str = "done", waiting: int = 2) -> QueueSampled:
    return QueueSampled(
        at_s=0, name="onnx", waiting=waiting, running=1, capacity=7, outcome=outcome, wait_s=0.02, service_s=0.03  # type: ignore[arg-type]
    )  # fmt: skip


ALL: list[Event] = [
    switch(),
    TensorDone(at_s=0, request_id="r", model="det", arm="cut:007:int8", status="ok", total_s=0.2, head_s=0.1,
               server_s=0.05),
    TextDone(at_s=0, request_id="r", model="smol", status="ok", prompt_tokens=9, completion_tokens=5, ttft_s=0.3,
             total_s=1.0, sides=(("device", 2), ("cloud", 3))),
    HandedOver(at_s=0, request_id="r", source="device", target="cloud", index=2, local=False),
    SourceLost(at_s=0, request_id="r", source="cloud", target="device", index=4),
    sample(),
    TransferSample(at_s=0, link="http", direction="up", size_bytes=1000, seconds=0.5),
    LinkStateChanged(at_s=0, link="mqtt", state="up"),
    PolicyJudged(at_s=0, version=3, accepted=True, code="accepted"),
    LimitHit(at_s=0, tenant="acme", dimension="tokens"),
    BudgetAlert(at_s=0, tenant="acme", window="day", ratio=0.5, spent_usd=0.6, budget_usd=1.0),
]  # fmt: skip


def folded(*events: Event) -> Exposition:
    page = Exposition()
    for event in events:
        page(event)
    return page


def test_the_page_is_well_formed_and_every_family_is_introduced_once() -> None:
    lines = folded(*ALL).render().splitlines()
    values = [line for line in lines if not line.startswith("#")]
    assert values
    assert all(LINE.fullmatch(line) for line in values)
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for line in values:
        family = re.sub(r"_(bucket|sum|count)$", "", line.split("{")[0].split(" ")[0])
        assert family in types or line.split("{")[0].split(" ")[0] in types


def test_each_event_is_counted_with_its_labels() -> None:
    page = folded(*ALL)
    assert page.value("midstream_arm_switches_total", model="det", source="device", target="cut:007:int8") == 1
    assert page.value("midstream_requests_total", way="tensor", status="ok") == 1
    assert page.value("midstream_requests_total", way="text") == 1
    assert page.value("midstream_handovers_total", source="device", target="cloud") == 1
    assert page.value("midstream_source_lost_total") == 1
    assert page.value("midstream_tokens_total", target="cloud") == 3
    assert page.value("midstream_transfer_bytes_total", direction="up") == 1000
    assert page.value("midstream_queue_waiting", queue="onnx") == 2
    assert page.value("midstream_link_up", link="mqtt") == 1
    assert page.value("midstream_policy_version") == 3
    assert page.value("midstream_limit_refusals_total", tenant="acme", limit="tokens") == 1
    assert page.value("midstream_budget_spent_ratio", tenant="acme", window="day") == 0.6


def test_the_exact_text() -> None:
    text = folded(switch(), switch()).render()
    assert text == (
        "# HELP midstream_arm_switches_total Changes of the arm that a model's requests take.\n"
        "# TYPE midstream_arm_switches_total counter\n"
        'midstream_arm_switches_total{model="det",source="device",target="cut:007:int8"} 2\n'
    )


def test_nothing_happened() -> None:
    page = Exposition()
    assert page.render() == ""
    assert page.value("midstream_arm_switches_total") == 0


def test_labels_are_escaped_and_cut() -> None:
    page = folded(switch(model='a"b\\c\nd'), switch(model="x" * 500))
    assert 'model="a\\"b\\\\c\\nd"' in page.render()
    assert f'model="{"x" * MAX_LABEL_CHARS}"' in page.render()


def test_the_number_of_series_is_bounded_and_the_sum_stays_right() -> None:
    page = Exposition(max_series=10)
    for number in range(10):
        page(switch(model=str(number)))
    assert page.value("midstream_arm_switches_total", model="other") == 0
    for number in range(10, 50):
        page(switch(model=str(number)))
    assert page.render().count("midstream_arm_switches_total{") == 11
    assert page.value("midstream_arm_switches_total", model="other") == 40
    assert page.value("midstream_arm_switches_total") == 50


def test_histograms_are_cumulative() -> None:
    def done(seconds: float) -> TensorDone:
        return TensorDone(at_s=0, request_id="r", model="m", arm="device", status="ok", total_s=seconds)

    text = folded(done(0.001), done(0.3), done(99.0), done(float("nan"))).render()
    counts = [int(n) for n in re.findall(r"midstream_tensor_seconds_bucket\{.*\} (\d+)", text)]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 3
    assert 'le="+Inf"} 3' in text
    assert 'midstream_tensor_seconds_count{arm="device",model="m"} 3' in text
    assert "midstream_tensor_seconds_sum" in text


def test_a_cut_is_one_arm_in_the_histogram() -> None:
    text = folded(*ALL).render()
    assert 'midstream_tensor_seconds_count{arm="cut",model="det"} 1' in text
    assert 'stage="head"' in text
    assert 'stage="encode"' not in text


def test_refused_work_has_no_waiting_time() -> None:
    page = folded(sample("refused"))
    assert page.value("midstream_queue_outcomes_total", outcome="refused") == 1
    assert "midstream_queue_wait_seconds" not in page.render()


def test_gauges_follow_the_last_event_and_can_be_set() -> None:
    page = folded(sample(waiting=5), sample(waiting=1), LinkStateChanged(at_s=0, link="mqtt", state="down"))
    assert page.value("midstream_queue_waiting") == 1
    assert page.value("midstream_link_up", link="mqtt") == 0
    page.set_gauge("midstream_ready_seconds", 0.4, help="Seconds to READY.")
    page.set_gauge("midstream_temperature_celsius", 48.5, {"zone": "cpu"})
    assert "# TYPE midstream_ready_seconds gauge\nmidstream_ready_seconds 0.4\n" in page.render()
    assert 'midstream_temperature_celsius{zone="cpu"} 48.5' in page.render()


def test_an_event_without_a_metric_is_counted_by_name() -> None:
    @frozen(kw_only=True)
    class Novelty(Event):
        pass

    assert folded(Novelty(at_s=0)).value("midstream_events_total", event="Novelty") == 1


def test_threads_lose_no_event() -> None:
    page = Exposition()

    def emit() -> None:
        for _ in range(500):
            page(switch())

    workers = [threading.Thread(target=emit) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert page.value("midstream_arm_switches_total") == 2000
