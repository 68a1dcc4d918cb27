"""What a failed or good attempt on a link means to the decider, and the one line of it in the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

from netprobe.view import UNKNOWN_LINK
from protocol.errors import Full, LinkError, LinkTimeout, MidstreamError
from protocol.policy import SplitPolicy
from split_models.decider import Decider
from split_models.runner_ports import RunnerPorts

MISFIT_S = 5.0
"""A far end whose answers do not fit is left alone this long, while the bundle is fetched again."""

MOST_CLOSED_S = 60.0

_log = logging.getLogger("midstream.split")


class LinkStates:
    """Of one model's links. A trouble is logged once, until the link has answered again."""

    def __init__(self, model: str, decider: Decider, ports: RunnerPorts) -> None:
        self._model = model
        self._decider = decider
        self._ports = ports
        self._told: set[str] = set()

    def open(self, link: str, policy: SplitPolicy) -> bool:
        """Whether the link answered last time, and its peer does not want to be left alone now."""
        return self._decider.open(link, policy, self._ports.clock())

    def answered(self, link: str) -> None:
        """The link is in order."""
        self._decider.answered(link)
        if link in self._told:
            self._told.discard(link)
            _log.info("%s: %s answers again", self._model, link)

    def failed(self, link: str, err: MidstreamError, began_s: float) -> None:
        """Leave `link` alone after an attempt that began at `began_s`."""
        now_s = self._ports.clock()
        if isinstance(err, Full):
            trouble = "the far end is full"
            self._decider.close(link, now_s + min(MOST_CLOSED_S, err.retry_after_s), trouble)
        elif isinstance(err, LinkError):
            trouble = self._what_failed(link, err, began_s)
            self._decider.failed(link, trouble, now_s)
        else:
            trouble = f"the far end does not fit: {err.message[:100]}"
            self._decider.close(link, now_s + MISFIT_S, trouble)
            self._ports.stale()
        self._tell(link, f"{trouble}: {err}")

    def stood_still(self, link: str, waited_s: float) -> None:
        """An attempt was given up since nothing moved any more. What the link is like now the probe knows by itself."""
        self._tell(link, f"link slow: nothing moved any more, given up after {waited_s:.2f} s")

    def _tell(self, link: str, trouble: str) -> None:
        say: Callable[..., None] = _log.debug if link in self._told else _log.info
        say("%s: %s: %s", self._model, link, trouble)
        self._told.add(link)

    def _what_failed(self, link: str, err: LinkError, began_s: float) -> str:
        """Slow and dead are told apart by whether anything was on its way."""
        if not isinstance(err, LinkTimeout):
            return f"link dead: {err.message[:200]}"
        view, waited_s = self._ports.links().get(link, UNKNOWN_LINK), self._ports.clock() - began_s
        sent = view.under_way
        if sent is not None and sent.at_s >= began_s:
            return f"link slow: over {sent.seconds:.1f} s for {sent.size_bytes} bytes"
        if view.age_s <= waited_s:
            return f"link slow: the answer was still on its way after {waited_s:.1f} s"
        return f"link dead: no connection within {waited_s:.1f} s"
