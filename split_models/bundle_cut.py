"""One cut of a bundle: its files, and what it weighs and takes on the machine that builds."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from statistics import median

from attrs import evolve, frozen

from engines.port import TensorModel, TensorRuntime
from protocol import zstd
from protocol.models import BatchFile, CutEntry
from protocol.oip import MAX_BODY_BYTES, InferRequest, InferResponse, encode_request, encode_response
from protocol.tensors import Tensor
from split_models.batch_onnx import try_batch
from split_models.bundle_files import BundleFolder
from split_models.codec import INT8, wire_bytes
from split_models.measure import MeasureRun, time_calls
from split_models.offer import Offered
from split_models.seam import Seam


@frozen
class CutWriter:
    """Writes the files of offered cuts into a folder and measures them.

    suffix: of the format's files. raw: names of tensors that still are the input, see split_models.raw_input. batches:
    as in the build's limits.
    """

    folder: BundleFolder
    seam: Seam
    runtime: TensorRuntime
    measure: MeasureRun
    threads: int
    suffix: str
    raw: frozenset[str] = frozenset()
    batches: bool = True

    def write(self, offered: Offered) -> CutEntry:
        """Make, write and measure head and tail. Raises EngineError when they do not load or run."""
        cut, codec = offered.cut, offered.codec
        parts = self.seam.parts(cut, codec)
        head_file, tail_file = f"head_{cut.id}_{codec}.{self.suffix}", f"tail_{cut.id}_{codec}.{self.suffix}"
        self.folder.write(head_file, parts.head)
        self.folder.write(tail_file, parts.tail)
        answer = self.seam.answer if codec == INT8 else None
        entry = CutEntry(
            id=cut.id,
            codec=codec,
            crossing=parts.crossing,
            head_file=head_file,
            head_sha256=hashlib.sha256(parts.head).hexdigest(),
            head_size_bytes=len(parts.head),
            tail_file=tail_file,
            tail_sha256=hashlib.sha256(parts.tail).hexdigest(),
            tail_size_bytes=len(parts.tail),
            wire_bytes=wire_bytes(codec, parts.crossing),
            head_flops=cut.head_flops,
            error_ratio=offered.error_ratio,
            sends_input=any(tensor.name in self.raw for tensor in cut.crossing),
            answer_scale=answer.scales[0] if answer else 0.0,
            answer_zero=answer.zeros[0] if answer else 0,
        )
        return self._measured(entry)

    def _measured(self, entry: CutEntry) -> CutEntry:
        """Seconds of both parts on the first input, bytes over all of them."""
        observed = self.seam.calibration.observed
        head = self.runtime.load(self.folder.path / entry.head_file, self.threads)
        try:
            head_s = self.measure(head, observed[0].case.made.inputs).median_s
            sent = [list(head.run(seen.case.made.inputs)) for seen in observed]
        finally:
            head.close()
        tail = self.runtime.load(self.folder.path / entry.tail_file, self.threads)
        try:
            tail_s = self.measure(tail, sent[0]).median_s
            answers = [list(tail.run(tensors)) for tensors in sent]
        finally:
            tail.close()
        form = batch_file(self.folder, entry.tail_file, sent, self.runtime, self.threads) if self.batches else None
        entry = evolve(entry, head_s=head_s, tail_s=tail_s, down_bytes=_size_bytes(answers[0]), batch=form)
        return compressed(entry, sent, answers) if zstd.available() else entry


def batch_file(
    folder: BundleFolder, name: str, asked: Sequence[Sequence[Tensor]], runtime: TensorRuntime, threads: int
) -> BatchFile | None:
    """Beside the ONNX file `name` its batch form, if that answers `asked` as the file does, and sooner; else None."""
    stem, _, suffix = name.rpartition(".")
    if suffix != "onnx":
        return None
    form = try_batch((folder.path / name).read_bytes(), asked, runtime, threads)
    if form is None:
        return None
    file = f"{stem}.batch.{suffix}"
    folder.write(file, form.data)
    digest = hashlib.sha256(form.data).hexdigest()
    return BatchFile(file, digest, len(form.data), round(form.gain_ratio, 3), form.error_ratio)


def compressed(entry: CutEntry, sent: Sequence[Sequence[Tensor]], answers: Sequence[Sequence[Tensor]]) -> CutEntry:
    """The entry with the sizes of its bodies under zstd, and half the seconds that both bodies take both ends."""
    down = [encode_response(InferResponse("m", tuple(tensors)), True)[1] for tensors in answers]
    packed_up, packed_down = [packed_request(tensors) for tensors in sent], [zstd.compress(body) for body in down]

    def all_four() -> None:
        packed_request(sent[0])
        zstd.decompress(packed_up[0], MAX_BODY_BYTES)
        zstd.compress(down[0])
        zstd.decompress(packed_down[0], MAX_BODY_BYTES)

    return evolve(
        entry,
        zstd_bytes=round(median(map(len, packed_up))),
        zstd_down_bytes=round(median(map(len, packed_down))),
        zstd_s=time_calls(all_four).median_s / 2,
    )


def packed_request(tensors: Sequence[Tensor]) -> bytes:
    """A request's whole body as the remote endpoint compresses it."""
    _, body = encode_request(InferRequest("m", tuple(tensors), binary=True))
    return zstd.compress_tensors(body[: len(body) - _size_bytes(tensors)], tensors)


def _size_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.size_bytes for tensor in tensors)


def run_through(head: TensorModel, tail: TensorModel, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The tail's outputs for these inputs of the head."""
    return tuple(tail.run(head.run(inputs)))
