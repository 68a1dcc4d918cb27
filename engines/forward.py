"""A LocalEndpoint that sends some models to a foreign inference server, and runs them here while that one cannot."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from engines.local import Left, LocalEndpoint
from engines.port import TensorAnswer, TensorEndpoint
from protocol.errors import BadRequest, LinkTimeout, MidstreamError, NotFound
from protocol.models import foreign_name
from protocol.tensors import Tensor

FORWARD_SHARE = 0.6
"""Of a request's time: the rest is kept for running it here."""

RETRY_S = 5.0
"""A foreign server that failed is left alone this long."""

USUAL_SHARE_S = 1.0
"""A time-out after less than this says that the client was in a hurry, and nothing of the server."""

ABSENT_RETRY_S = 60.0
"""A model that the foreign server does not have is asked for again after this long."""

_log = logging.getLogger("midstream.engines")


class ForwardingEndpoint(LocalEndpoint):
    """Runs models by name, as LocalEndpoint does; those that were registered (bundles) are asked of `server` first.

    Args:
        server: an Open Inference Protocol v2 server (engines.remote_oip.RemoteEndpoint). It gives no digest, so names
            there carry it: see protocol.models.foreign_name, and `midstream tails export`.
    """

    def __init__(self, *args: Any, server: TensorEndpoint, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server = server
        self._foreign: dict[str, tuple[str, str]] = {}
        self._absent_until_s: dict[str, float] = {}
        self._closed_until_s = 0.0
        self._trouble = ""

    def register(self, name: str, file: Path, digest: str | None = None, runtime: str | None = None) -> None:
        """As LocalEndpoint.register; with a digest the model is asked of the server from now on."""
        super().register(name, file, digest, runtime)
        if digest is not None:
            self._foreign[name] = (foreign_name(name, digest), digest)

    def unregister(self, name: str) -> None:
        """Forget a name here and there."""
        self._foreign.pop(name, None)
        self._absent_until_s.pop(name, None)
        super().unregister(name)

    async def infer(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        *,
        load: bool = True,
        left: Left | None = None,
    ) -> TensorAnswer:
        """As LocalEndpoint.infer; what the server refuses or cannot do is run here."""
        began_s = self._clock()
        if model in self._foreign and began_s >= max(self._closed_until_s, self._absent_until_s.get(model, 0.0)):
            name, digest = self._foreign[model]
            share_s = FORWARD_SHARE * deadline_s
            try:
                answer = await self._server.infer(name, inputs, share_s)
            except MidstreamError as err:
                self._failed(model, err, share_s)
            else:
                self._answered()
                return evolve(answer, digest=digest, compute_s=max(0.0, self._clock() - began_s - answer.wait_s))
        left_s = max(0.001, deadline_s - (self._clock() - began_s))
        return await super().infer(model, inputs, left_s, load=load, left=left)

    def wait_s(self) -> float:
        """The wait where a request would go now."""
        forwarding = self._foreign and self._clock() >= self._closed_until_s
        return self._server.wait_s() if forwarding else super().wait_s()

    def _failed(self, model: str, err: MidstreamError, share_s: float) -> None:
        if isinstance(err, LinkTimeout) and share_s < USUAL_SHARE_S:
            return
        if isinstance(err, BadRequest):  # whether the input or the set-up is wrong, the run here will tell
            return
        if isinstance(err, NotFound):
            if model not in self._absent_until_s:
                _log.warning("%s runs here: %s", model, err)
            self._absent_until_s[model] = self._clock() + ABSENT_RETRY_S
            return
        self._closed_until_s = self._clock() + RETRY_S
        if not self._trouble:
            _log.warning("the tensor server does not answer, models run here meanwhile: %s", err)
        self._trouble = str(err)

    def _answered(self) -> None:
        if self._trouble:
            _log.warning("the tensor server answers again")
        self._trouble = ""
