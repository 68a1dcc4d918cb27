"""One suite over every ControlChannel: memory, mosquitto (MQTT 5 and 3.1.1), amqtt (3.1.1, found out by itself)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Literal

import pytest
from attrs import define

from links.memory_control import MemoryBroker, MemoryControlChannel
from links.mqtt import MqttChannel, MqttSettings
from links.port import ControlChannel, ControlState, Delivery
from links.session import SessionRules
from protocol.errors import BadRequest, LinkClosed, TooLarge

KINDS = ("memory", "mosquitto-5", "mosquitto-3.1.1", "amqtt")
RULES = SessionRules(spread_s=0.3, base_s=0.2, least_s=0.01, stable_s=0.2, short_s=0.0)


@define
class House:
    """How to make channels on one broker, and how to take the broker away and back."""

    make: Callable[[str, Delivery | None], ControlChannel]
    stop: Callable[[], Awaitable[None]]
    restart: Callable[[], Awaitable[None]]


@pytest.fixture(params=KINDS)
async def house(request: pytest.FixtureRequest, free_port: Callable[[], int]) -> AsyncIterator[House]:
    kind = request.param
    made: list[ControlChannel] = []
    embedded: _Embedded | None = None

    def tracked(channel: ControlChannel) -> ControlChannel:
        made.append(channel)
        return channel

    if kind == "memory":
        broker = MemoryBroker()
        yield House(
            lambda name, will: tracked(MemoryControlChannel(broker, name, will=will)),
            _awaitable(broker.stop),
            _awaitable(broker.restart),
        )
    else:
        version: Literal[4, 5] = 4 if kind == "mosquitto-3.1.1" else 5
        if kind == "amqtt":
            port = free_port()
        else:
            mosquitto = request.getfixturevalue("mosquitto")
            port = mosquitto.port

        def make(name: str, will: Delivery | None) -> ControlChannel:
            settings = MqttSettings(
                "127.0.0.1", port, name, will=will, version=version, rules=RULES, welcome_s=0.5, keepalive_s=5
            )
            return tracked(MqttChannel(settings))

        if kind != "amqtt":
            yield House(make, _awaitable(mosquitto.kill), _awaitable(mosquitto.restart))
        else:
            embedded = _Embedded(port)
            await embedded.restart()
            yield House(make, embedded.stop, embedded.restart)
    for channel in made:
        await channel.close()
    if embedded is not None:
        await embedded.stop()


def _awaitable(work: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        work()

    return call


class _Embedded:
    """amqtt in this process."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._broker: Any = None

    async def restart(self) -> None:
        from amqtt.broker import Broker

        for name in ("amqtt", "transitions"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._broker = Broker(
            {
                "listeners": {"default": {"type": "tcp", "bind": f"127.0.0.1:{self._port}"}},
                "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
            }
        )
        await self._broker.start()

    async def stop(self) -> None:
        broker, self._broker = self._broker, None
        if broker is not None:
            await broker.shutdown()


async def _until(condition: Callable[[], bool], seconds: float = 8.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def _up(channel: ControlChannel) -> list[ControlState]:
    """Wait until the channel is up; the list goes on recording its states."""
    states: list[ControlState] = []
    channel.watch(states.append)
    await channel.subscribe("warm/up", lambda delivery: None)
    await _until(lambda: states[-1] == "up")
    return states


async def test_messages_reach_matching_subscribers_once(house: House) -> None:
    sender, receiver = house.make("sender", None), house.make("receiver", None)
    one: list[Delivery] = []
    all_of_it: list[Delivery] = []
    await receiver.subscribe("f/+/state", one.append)
    await receiver.subscribe("g/#", all_of_it.append)
    await _up(receiver)
    await _up(sender)
    await sender.publish("f/pi/state", b"1")
    await sender.publish("f/pi/other", b"no")
    await sender.publish("g/a/b", b"2")
    await sender.publish("f/desk/state", b"3")
    await _until(lambda: len(one) == 2 and len(all_of_it) == 1)
    assert [(d.topic, d.payload, d.retained) for d in one] == [
        ("f/pi/state", b"1", False),
        ("f/desk/state", b"3", False),
    ]
    assert all_of_it[0].topic == "g/a/b"


async def test_what_was_published_before_the_channel_was_up_arrives_in_order(house: House) -> None:
    receiver, sender = house.make("receiver", None), house.make("sender", None)
    got: list[bytes] = []
    await receiver.subscribe("q/#", lambda delivery: got.append(delivery.payload))
    await _up(receiver)
    for number in range(30):
        await sender.publish(f"q/{number}", str(number).encode())
    await _until(lambda: len(got) == 30)
    assert got == [str(number).encode() for number in range(30)]


async def test_late_subscribers_get_the_retained_message_marked_as_such(house: House) -> None:
    sender, receiver = house.make("sender", None), house.make("receiver", None)
    await _up(sender)
    await sender.publish("r/state", b"old", retain=True)
    await sender.publish("r/state", b"new", retain=True)
    got: list[Delivery] = []
    await receiver.subscribe("r/#", got.append)
    await _until(lambda: len(got) == 1)
    assert got == [Delivery("r/state", b"new", retained=True)]


async def test_an_empty_retained_message_takes_the_old_one_away(house: House) -> None:
    sender, receiver = house.make("sender", None), house.make("receiver", None)
    await _up(sender)
    await sender.publish("r/state", b"old", retain=True)
    await sender.publish("r/state", b"", retain=True)
    got: list[Delivery] = []
    await receiver.subscribe("r/#", got.append)
    await _up(receiver)
    await asyncio.sleep(0.1)
    assert got == []


async def test_unsubscribed_handlers_hear_nothing_more(house: House) -> None:
    sender, receiver = house.make("sender", None), house.make("receiver", None)
    stays: list[Delivery] = []
    leaves: list[Delivery] = []
    await receiver.subscribe("u/x", stays.append)
    unsubscribe = await receiver.subscribe("u/x", leaves.append)
    await _up(receiver)
    await unsubscribe()
    await sender.publish("u/x", b"1")
    await _until(lambda: len(stays) == 1)
    assert leaves == []


async def test_a_failing_handler_harms_nobody_else(house: House) -> None:
    """MQ8: an exception in a message handler kills paho's own loop silently."""
    sender, receiver = house.make("sender", None), house.make("receiver", None)
    got: list[bytes] = []

    def broken(delivery: Delivery) -> None:
        raise RuntimeError("a bug in a handler")

    await receiver.subscribe("h/x", broken)
    await receiver.subscribe("h/x", lambda delivery: got.append(delivery.payload))
    await _up(receiver)
    await sender.publish("h/x", b"1")
    await sender.publish("h/x", b"2")
    await _until(lambda: got == [b"1", b"2"])


async def test_the_goodbye_is_delivered_and_the_will_is_not(house: House) -> None:
    watcher = house.make("watcher", None)
    leaver = house.make("leaver", Delivery("w/leaver", b"lost", retained=True))
    got: list[bytes] = []
    await watcher.subscribe("w/+", lambda delivery: got.append(delivery.payload))
    await _up(watcher)
    await _up(leaver)
    await leaver.close(last=Delivery("w/leaver", b"bye", retained=True))
    await _until(lambda: bool(got))
    await asyncio.sleep(0.1)
    assert got == [b"bye"]


async def test_a_broker_that_vanishes_and_comes_back(house: House) -> None:
    """MQ4, MQ10: nothing published meanwhile is lost, subscriptions are made again."""
    sender, receiver = house.make("sender", None), house.make("receiver", None)
    got: list[bytes] = []
    await receiver.subscribe("v/#", lambda delivery: got.append(delivery.payload))
    receiver_states, sender_states = await _up(receiver), await _up(sender)
    await house.stop()
    await _until(lambda: receiver_states[-1] == "down" and sender_states[-1] == "down")
    await house.restart()
    await _until(lambda: receiver_states[-1] == "up")
    await sender.publish("v/1", b"1")
    await sender.publish("v/2", b"2")
    await _until(lambda: got == [b"1", b"2"])


async def test_wrong_topics_and_sizes_are_refused_by_name(house: House) -> None:
    channel = house.make("strict", None)
    for topic in ("", "a/#", "a/+", "a\0b"):
        with pytest.raises(BadRequest):
            await channel.publish(topic, b"")
    for pattern in ("", "a#", "#/a", "a+/b"):
        with pytest.raises(BadRequest):
            await channel.subscribe(pattern, lambda delivery: None)
    with pytest.raises(TooLarge):
        await channel.publish("a", bytes(8193))


async def test_a_closed_channel_takes_nothing(house: House) -> None:
    channel = house.make("gone", None)
    await _up(channel)
    await channel.close()
    await channel.close()
    with pytest.raises(LinkClosed):
        await channel.publish("a", b"")


async def test_watchers_hear_the_present_state_and_can_leave(house: House) -> None:
    channel = house.make("watched", None)
    first: list[ControlState] = []
    second: list[ControlState] = []
    channel.watch(first.append)
    unwatch = channel.watch(second.append)
    unwatch()
    await _up(channel)
    assert (first, second) == (["down", "up"], ["down"])
