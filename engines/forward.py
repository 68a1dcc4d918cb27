"""A LocalEndpoint that sends some models to a foreign inference server, and runs them here while that one cannot."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve

from engines.local import LocalEndpoint
from engines.port import TensorAnswer, TensorEndpoint
from protocol.errors import BadRequest, MidstreamError, NotAllowed, NotFound, TooLarge
from protocol.tensors import Tensor

FORWARD_SHARE = 0.6
"""Of a request's time: the rest is kept for running it here."""

RETRY_S = 5.0
"""A foreign server that failed is left alone this long."""

_OURS = (NotFound, NotAllowed, TooLarge)
"""Refusals that say something about the server's set-up and not about the request."""

_log = logging.getLogger("midstream.engines")


class ForwardingEndpoint(LocalEndpoint):
    """Runs models by name, as LocalEndpoint does; those in `foreign` are asked of `server` first.

    Args:
        server: an Open Inference Protocol v2 server (engines.remote_oip.RemoteEndpoint).

    A foreign server gives no digest, so a model's name there must carry it.
    """

    def __init__(self, *args: Any, server: TensorEndpoint, **options: Any) -> None:
        super().__init__(*args, **options)
        self._server = server
        self._foreign: dict[str, tuple[str, str]] = {}
        self._closed_until_s = 0.0
        self._trouble = ""

    def forward(self, name: str, foreign_name: str, digest: str) -> None:
        """Ask the server for `name` under `foreign_name`; answers are taken to be of weights `digest`."""
        self._foreign[name] = (foreign_name, digest)

    @property
    def foreign(self) -> Mapping[str, str]:
        """Names here, and what they are called there."""
        return {name: there for name, (there, _) in self._foreign.items()}

    def unregister(self, name: str) -> None:
        """Forget a name here and there."""
        self._foreign.pop(name, None)
        super().unregister(name)

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """As LocalEndpoint.infer. Raises BadRequest as the foreign server found it."""
        there = self._foreign.get(model)
        began_s = self._clock()
        if there is None or began_s < self._closed_until_s:
            return await super().infer(model, inputs, deadline_s)
        name, digest = there
        try:
            answer = await self._server.infer(name, inputs, FORWARD_SHARE * deadline_s)
        except BadRequest as err:
            if not isinstance(err, _OURS):
                raise
            self._failed(err)
        except MidstreamError as err:
            self._failed(err)
        else:
            self._answered()
            return evolve(answer, digest=digest, compute_s=max(0.0, self._clock() - began_s - answer.wait_s))
        return await super().infer(model, inputs, max(0.001, deadline_s - (self._clock() - began_s)))

    def wait_s(self) -> float:
        """The wait where a request would go now."""
        forwarding = self._foreign and self._clock() >= self._closed_until_s
        return self._server.wait_s() if forwarding else super().wait_s()

    def _failed(self, err: MidstreamError) -> None:
        self._closed_until_s = self._clock() + RETRY_S
        if not self._trouble:
            _log.warning("the tensor server does not answer, models run here meanwhile: %s", err)
        self._trouble = str(err)

    def _answered(self) -> None:
        if self._trouble:
            _log.info("the tensor server answers again")
        self._trouble = ""
