"""The two ports of this room. Tensors: TensorRuntime, TensorModel, TensorEndpoint. Text: TextEngine, Continuation.

Implementations map every foreign exception to EngineError, LinkError or RejectedError.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Generic, Protocol, TypeVar, runtime_checkable

from attrs import field, frozen

from engines.stop import Stop
from links.port import WireTimes
from protocol.events import TransferSample
from protocol.tensors import Tensor, TensorSpec
from protocol.text import TextCapabilities, TextRequest, Token
from protocol.upstream import UpstreamCodec

T = TypeVar("T")


class TensorModel(Protocol):
    """A loaded model. Blocking; used by one thread at a time."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    def run(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """All outputs in order. Raises BadRequest for inputs that do not fit, EngineError when the runtime fails."""
        ...

    def close(self) -> None:
        """Free the model; idempotent."""
        ...


@runtime_checkable
class StoppableModel(Protocol):
    """A loaded model whose run can be ended early, within one operator of its graph."""

    def run_until(self, inputs: Sequence[Tensor], stop: Stop) -> Sequence[Tensor]:
        """As TensorModel.run. Raises engines.stop.Stopped soon after `stop` asks for the end."""
        ...


class TensorRuntime(Protocol):
    """Loads model files of one format."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    def load(self, file: Path, threads: int) -> TensorModel:
        """Raises EngineError when the file is not a model this runtime can load."""
        ...


@frozen
class TensorAnswer:
    """Outputs with where the time went. `digest` names the weights that answered.

    encode_s, decode_s: making and reading bodies here, compression included. up_bytes, down_bytes: bodies as they
    crossed. All four are 0 where nothing crossed.
    `wire` is what the link measured, all zero if it does not.
    """

    outputs: Sequence[Tensor]
    digest: str
    wait_s: float = 0.0
    compute_s: float = 0.0
    transfers: Sequence[TransferSample] = ()
    encode_s: float = 0.0
    decode_s: float = 0.0
    up_bytes: int = 0
    down_bytes: int = 0
    wire: WireTimes = field(factory=WireTimes)


class TensorEndpoint(Protocol):
    """Something that answers tensor requests by model name: local, or a remote twin."""

    async def infer(self, model: str, inputs: Sequence[Tensor], deadline_s: float) -> TensorAnswer:
        """Answer within `deadline_s` seconds from now. Raises Full, NotFound, BadRequest, EngineError or LinkError."""
        ...

    def wait_s(self) -> float:
        """Seconds a request that came now would wait before it runs."""
        ...


@runtime_checkable
class CompressingEndpoint(Protocol):
    """A far end that may also take compressed bodies."""

    def compressing(self) -> TensorEndpoint | None:
        """The same far end with zstd bodies; None unless its server said that it takes them."""
        ...


@frozen
class Worked(Generic[T]):
    """An answer, what was made of it, and the seconds that this work waited and ran."""

    answer: TensorAnswer
    result: T
    wait_s: float
    run_s: float


class WorkingEndpoint(Protocol):
    """A far end whose answers are worked on before the next one is read, so that a burst of them fills no queue."""

    async def infer_then(
        self,
        model: str,
        inputs: Sequence[Tensor],
        deadline_s: float,
        work: Callable[[TensorAnswer], T],
        *,
        packed: bool = False,
    ) -> Worked[T]:
        """Ask, then do `work`, which may block, within `deadline_s`. Raises what asking or `work` raised."""
        ...


@runtime_checkable
class BurstEndpoint(Protocol):
    """A far end that may have a stream of its own for requests that can wait."""

    def working(self) -> WorkingEndpoint | None:
        """The same far end by that stream; None where there is none."""
        ...


@frozen
class EngineLoad:
    """Requests that run and wait, and the wait that a new one would see."""

    running: int
    waiting: int
    wait_s: float


class Continuation(Protocol):
    """One prepared generation. Closing it is the only way to cancel it."""

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def cached_tokens(self) -> int: ...

    async def extend(self, tokens: Sequence[Token]) -> None:
        """Append tokens that another engine made, and prefill them; may be buffered. Only before start()."""
        ...

    def start(self, at: int, ahead_tokens: int) -> AsyncIterator[Token]:
        """Generate; once. The first token has index == `at` == prefix + extended tokens.

        Pauses when it is `ahead_tokens` past the last acknowledged index.
        """
        ...

    def acknowledge(self, index: int) -> None:
        """Tokens up to and including `index` were taken by the consumer."""
        ...

    async def close(self) -> None:
        """Cancel and free; idempotent; touches no other request."""
        ...


@runtime_checkable
class SpokenContinuation(Protocol):
    """A continuation that may have made its first token while it prefilled."""

    def spoken(self) -> Token | None:
        """The token that start() will give first and that ends nothing, if it is made already; extend() forgets it."""
        ...


class RelayingEngine(Protocol):
    """A model server whose answers may be given on in its own bytes, to clients of the same wire form."""

    @property
    def model(self) -> str:
        """Its name there."""
        ...

    @property
    def codec(self) -> UpstreamCodec: ...

    async def relayed(self, request: TextRequest, stop: Sequence[str], deadline_s: float) -> bytes:
        """The whole answer. Raises what TextEngine.prepare raises, or Unsupported."""
        ...

    def relayed_lines(self, request: TextRequest, stop: Sequence[str]) -> AsyncIterator[bytes]:
        """The streamed answer in chunks as they come; raises before the first one what kept it from beginning."""
        ...


class TextEngine(Protocol):
    """Generates text: in process, in a worker process, on a stock server or at a peer."""

    async def capabilities(self) -> TextCapabilities: ...

    async def prepare(self, request: TextRequest, deadline_s: float) -> Continuation:
        """Admit the request and prefill prompt and prefix.

        Raises Full (over capacity), ContextOverflow, EngineError or LinkError.
        """
        ...

    async def tokenize(self, data: bytes) -> tuple[int, ...]: ...

    async def embed(self, texts: Sequence[str]) -> Sequence[Sequence[float]]: ...

    def load(self) -> EngineLoad: ...

    async def close(self) -> None: ...
