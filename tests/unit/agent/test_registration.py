"""The registration document: what counts as news, and what is left out when it grows too large."""

from __future__ import annotations

import asyncio

from attrs import evolve

from agent.registration import Registrar, keep_registered
from protocol.decode import decode
from protocol.device import DeviceProfile, Measured
from protocol.documents import Registration
from protocol.topics import MAX_PAYLOAD_BYTES

WHOLE = Measured("d" * 64, "onnx", 3, "whole", 0.2, 0.01)


def heads(count: int) -> tuple[Measured, ...]:
    return tuple(evolve(WHOLE, what=f"head:{number}:int8") for number in range(count))


def read(document: bytes) -> Registration:
    return decode(Registration, document, what="registration")


def test_news_stays_news_until_it_was_told() -> None:
    registrar = Registrar(lambda: DeviceProfile(device_id="pi"), lambda: ("m",), "1")
    first = registrar.news(1, 0)
    assert first is not None
    assert registrar.news(1, 0) == first
    registrar.told(first)
    assert registrar.news(2, 0) is None, "another epoch alone is no news"
    assert registrar.news(2, 1) is not None
    registrar.forget()
    assert registrar.news(1, 0) == first


def test_measurements_of_most_use_stay_within_the_bound_and_the_rest_is_counted() -> None:
    profile = DeviceProfile(device_id="pi", measured=(*heads(900), WHOLE, evolve(WHOLE, what="load")))
    news = Registrar(lambda: profile, lambda: (), "1").news(1, 0)
    assert news is not None
    assert MAX_PAYLOAD_BYTES - 512 < len(news.document) <= MAX_PAYLOAD_BYTES
    found = read(news.document).profile
    assert [row.what for row in found.measured[-2:]] == ["whole", "load"]
    assert found.measured_left_out == 902 - len(found.measured)


def test_a_document_within_the_bound_leaves_nothing_out() -> None:
    profile = DeviceProfile(device_id="pi", measured=heads(20))
    news = Registrar(lambda: profile, lambda: (), "1").news(1, 0)
    assert news is not None
    assert (len(read(news.document).profile.measured), read(news.document).profile.measured_left_out) == (20, 0)


async def test_what_comes_to_be_served_is_registered() -> None:
    models: list[str] = []
    registered: list[tuple[str, ...]] = []
    heard = asyncio.Event()

    async def register() -> None:
        registered.append(tuple(models))
        heard.set()

    task = asyncio.create_task(keep_registered(lambda: tuple(models), register, 0.005))
    await asyncio.sleep(0.03)
    assert registered == [], "nothing changed"
    models.append("smollm2-135m")
    await asyncio.wait_for(heard.wait(), 5)
    await asyncio.sleep(0.03)
    assert registered == [("smollm2-135m",)]
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
