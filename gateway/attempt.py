"""One attempt at one target: prepare it with the answer so far, start it, wait for its first token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, frozen

from engines.port import Continuation
from gateway.ahead import Ahead
from gateway.context import RequestContext
from gateway.line import AnswerLine, ids_may_cross
from gateway.race import Cleanup, Live
from gateway.spending import Spending
from gateway.targets import AnswerLengths, Target, TargetBoard, TargetView
from gateway.tool_prompt import adapted
from protocol.clock import Clock
from protocol.errors import EngineError, LinkTimeout, Unsupported
from protocol.events import Emit
from protocol.policy import DispatchPolicy
from protocol.text import Message, TextCapabilities, TextRequest, Token


@frozen
class StreamPorts:
    """What streams share. `rtt_s` gives round trips by target name, as far as known. spending: of this request.

    priced: a view at what its tokens cost now, energy included.
    """

    board: TargetBoard
    lengths: AnswerLengths
    clock: Clock
    emit: Emit
    rtt_s: Callable[[], Mapping[str, float]]
    spending: Spending | None = None
    priced: Callable[[TargetView, DispatchPolicy], TargetView] = lambda view, policy: view


@frozen
class Attempts:
    """Attempts of one stream; all of them see the same answer line and end by the request's deadline."""

    context: RequestContext
    request: TextRequest
    line: AnswerLine
    targets: Sequence[Target]
    ports: StreamPorts
    cleanup: Cleanup
    ahead_tokens: int
    listens: bool = False
    """Logprobs of local targets are wanted beside what the client asked for."""

    def rest_s(self) -> float:
        """Seconds left for the request."""
        return max(0.0, self.context.deadline_at_s - self.ports.clock())

    async def begin(self, target: Target, at: int, ahead: Ahead | None = None) -> Live:
        """Start `target` at token `at` and wait for its first token.

        `ahead` is its own preparation, if there is one. Whatever was opened is closed on failure and cancellation.
        """
        begun_s = self.ports.clock()
        try:
            async with asyncio.timeout(self.rest_s()):
                continuation = await (self._finished(ahead, at) if ahead else self.prepare(target, at))
                live = await self._start(target, continuation, at)
        except TimeoutError as err:
            raise LinkTimeout(f"{target.name} gave no first token within the request's deadline") from err
        except asyncio.CancelledError:
            if at == 0:
                self.ports.board.outlasted(target, self.context.model, self.ports.clock() - begun_s)
            raise
        live.ttft_s = self.ports.clock() - begun_s
        return live

    async def _finished(self, ahead: Ahead, at: int) -> Continuation:
        try:
            return await ahead.finish(at)
        except BaseException:
            self.cleanup.add(ahead.close())
            raise

    async def _start(self, target: Target, continuation: Continuation, at: int) -> Live:
        try:
            tokens = continuation.start(at, self.ahead_tokens)
        except BaseException:
            self.cleanup.add(continuation.close())
            raise
        live = Live(target, continuation, tokens, None, 0.0)
        try:
            live.first = await anext(tokens)
        except StopAsyncIteration as err:
            self.cleanup.add(live.close())
            raise EngineError(f"{target.name} ended without a token or a finish reason") from err
        except BaseException:
            self.cleanup.add(live.close())
            raise
        return live

    async def prepare(self, target: Target, at: int) -> Continuation:
        """Prefill the prompt and the first `at` tokens of the answer."""
        request = await self._listening(target) if self.listens and target.local else self.request
        sampling = self.request.sampling
        if at or sampling.logprobs or self.special:
            capabilities = await self.ports.board.capabilities(target, self.context.model)
            request = adapted(request, capabilities)
            if at:
                self._check_continues(target, capabilities)
                self._check_call(target, capabilities)
            if sampling.logprobs and not capabilities.logprobs:
                raise Unsupported(f"{target.name} gives no logprobs", next_step="leave logprobs out", field="logprobs")
        request = evolve(request, prefix=tuple(self.tokens_for(target, 0, at)))
        spending, known = self.ports.spending, self.known(target)
        if spending is None:
            return await target.engine.prepare(request, self.rest_s())
        resends = known is None or known.continues != "ids"
        return await spending.prepare(target, request, self.rest_s(), resends=resends)

    async def _listening(self, target: Target) -> TextRequest:
        capabilities = await self.ports.board.capabilities(target, self.context.model)
        sampling = self.request.sampling
        if not capabilities.logprobs or sampling.logprobs:
            return self.request
        return evolve(self.request, sampling=evolve(sampling, logprobs=1))

    @property
    def special(self) -> bool:
        """The request has what some engines must be told in another way: tools, their turns, or a format."""
        request = self.request
        return bool(request.tools or request.response_format) or any(
            isinstance(turn, Message) and (turn.tool_calls or turn.role == "tool") for turn in request.prompt
        )

    def _check_call(self, target: Target, capabilities: TextCapabilities) -> None:
        """A call that was begun as text cannot be gone on with by an engine that writes none."""
        if capabilities.tools and self.request.tools and self.line.in_call:
            raise EngineError(f"{target.name} cannot go on with a tool call that another engine began")

    def _check_continues(self, target: Target, capabilities: TextCapabilities) -> None:
        if capabilities.continues == "no":
            raise EngineError(f"{target.name} cannot continue a partial answer")
        wanted = adapted(self.request, capabilities)
        bound = wanted.sampling.grammar is not None or wanted.sampling.json_schema is not None
        if wanted.response_format or (bound and not capabilities.grammar):
            # A stock server would begin its schema anew.
            raise EngineError(f"{target.name} cannot continue an answer that must fit a schema")
        prompt = self.request.prompt
        by_number = bool(self.request.sampling.logit_bias) or (bool(prompt) and isinstance(prompt[0], int))
        if by_number and not self.by_ids(target):
            raise EngineError(f"{target.name} has another vocabulary than the token ids of this request")

    async def learn(self, target: Target) -> None:
        """Ask for capabilities while it lives; after a loss only the answer's bytes would be left."""
        await self.ports.board.capabilities(target, self.context.model)

    def known(self, target: Target) -> TextCapabilities | None:
        """Capabilities, if they were asked before."""
        return self.ports.board.known(target, self.context.model)

    def tokens_for(self, target: Target, first: int, end: int) -> Sequence[Token]:
        """Tokens [first, end) of the answer as `target` may see them."""
        return self.line.tokens(first, end, self.by_ids(target))

    def by_ids(self, target: Target) -> bool:
        """Whether `target` may be given token ids: every maker of the answer has its vocabulary."""
        known = self.known(target)
        if known is None or known.continues != "ids":
            return False
        return ids_may_cross(known.vocabulary, self.line.makers, self._vocabulary)

    def _vocabulary(self, name: str) -> str | None:
        known = self.known(next(target for target in self.targets if target.name == name))
        return known.vocabulary if known is not None else None
