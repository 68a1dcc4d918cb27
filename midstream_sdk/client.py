"""The SDK's entrance: engines by name, models by name, and the gateway's say in which of them `auto` means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from links.http import HttpLink
from links.port import Link
from midstream_sdk.channel import Channel
from midstream_sdk.engines import Engine, HttpEngine
from midstream_sdk.handle import AUTO, ModelHandle, Ran
from protocol.control_frames import Instruction
from protocol.decode import plain
from protocol.errors import BadRequest, MidstreamError

AGENT_URL = "http://127.0.0.1:8790"
DEVICE, CLOUD = "device", "cloud"
EDGE_NAMES = frozenset({"device", "edge", "local"})


class Client:
    """Use as an async context manager, or call close().

    Args:
        agent: base URL of the agent on this device, None where there is none: then `device` is an engine of the app's.
        gateway: base URL of a gateway in the cloud: the engine `cloud`. The control channel leads to it, or to the
            agent where there is no gateway.
        key: the gateway's key.
        engines: further engines by name, or others for `device` and `cloud`.
        order: names as `auto` tries them; the gateway's route puts its target first.
        channel: whether to hold the control channel.
    """

    def __init__(
        self,
        agent: str | None = AGENT_URL,
        gateway: str | None = None,
        *,
        key: str | None = None,
        engines: Mapping[str, Engine] | None = None,
        order: Sequence[str] = (),
        model: str = "",
        channel: bool = True,
        device: str = "",
        session: str | None = None,
    ) -> None:
        self.engines: dict[str, Engine] = {}
        if agent is not None:
            self.engines[DEVICE] = HttpEngine(_link("agent", agent, None))
        if gateway is not None:
            self.engines[CLOUD] = HttpEngine(_link("gateway", gateway, key))
        self.engines |= engines or {}
        if not self.engines:
            raise BadRequest("there is no engine", next_step="give agent, gateway or engines", field="engines")
        self._order = tuple(order) or tuple(self.engines)
        self._model = model
        self._named: set[str] = set()
        self._control = _link("control", gateway or agent or "", key if gateway else None) if gateway or agent else None
        self.channel: Channel | None = None
        self._wants = (channel and self._control is not None, device, session)

    async def __aenter__(self) -> Client:
        """Open the control channel; it connects in the background."""
        wanted, device, session = self._wants
        if wanted and self._control is not None:
            self.channel = Channel(self._control, self._obey, self._about, device=device, session=session)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the channel and close every engine."""
        channel, self.channel = self.channel, None
        if channel is not None:
            await channel.close()
        if self._control is not None:
            await self._control.close()
        for engine in self.engines.values():
            await engine.close()

    def model(self, name: str = "", engine: str = AUTO) -> ModelHandle:
        """A handle. name: empty follows the gateway's choice; engine: a name, or `auto`."""
        if engine != AUTO and engine not in self.engines:
            known = ", ".join((AUTO, *self.engines))
            raise BadRequest(f"there is no engine {engine[:64]!r}", next_step=f"known: {known}", field="engine")
        if name:
            self._named.add(name)

        def order() -> Sequence[str]:
            return self.order if engine == AUTO else (engine,)

        return ModelHandle(lambda: name or self._default(), order, self.engines, self._tell)

    @property
    def order(self) -> tuple[str, ...]:
        """Engines as `auto` tries them now."""
        return self._order

    def _default(self) -> str:
        if not self._model:
            raise BadRequest(
                "no model is named and the gateway has chosen none",
                next_step="name one: client.model(NAME)",
                field="model",
            )
        return self._model

    def _about(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return tuple(self.engines)[:32], tuple(sorted(self._named | ({self._model} - {""})))[:32]

    async def _obey(self, order: Instruction) -> Mapping[str, Any]:
        if order.do == "route":
            return self._route(order.target)
        if order.do == "switch":
            was, self._model = self._model, order.model
            return {"model": order.model, "changed": was != order.model}
        if order.do == "warm":
            name = self._engine_name(order.target) if order.target else self.order[0]
            warmth = await self.model(order.model, name).warm()
            return dict(plain(warmth))
        raise BadRequest(f"this SDK does not know {order.do!r}", next_step="update it", field="do")

    def _route(self, target: str) -> Mapping[str, Any]:
        name = self._engine_name(target)
        self._order = (name, *(other for other in self._order if other != name))
        return {"order": list(self._order)}

    def _engine_name(self, target: str) -> str:
        """`edge` and `local` mean the device; any other target is an engine's name."""
        if target in self.engines:
            return target
        if target in EDGE_NAMES and DEVICE in self.engines:
            return DEVICE
        raise BadRequest(
            f"this app has no engine for {target[:64]!r}", next_step=f"it has {', '.join(self.engines)}", field="target"
        )

    def _tell(self, ran: Ran) -> None:
        """What the app ran itself goes to the gateway; a full outbox must not fail the app's own request."""
        if self.channel is None:
            return
        try:
            self.channel.report(ran.model, "answer", plain(ran))
        except MidstreamError:
            return


def _link(name: str, url: str, key: str | None) -> Link:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return HttpLink(name, url, headers=headers) if headers else HttpLink(name, url)
