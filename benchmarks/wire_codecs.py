"""What the int8 form weighs with zstd against float32, and what it does to the answer, on real pictures."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Sequence
from math import prod
from pathlib import Path

from attrs import frozen

from benchmarks.verify import verify_offered
from engines.arrays import to_array
from engines.catalogue import shipped_catalogue
from engines.onnx import OnnxRuntime
from engines.store import ModelStore, default_store
from protocol.models import BundleManifest, CutEntry
from protocol.tensors import Tensor, TensorSpec
from split_models.bundle import BundleLimits, build_bundle
from split_models.bundle_cut import packed_request
from split_models.images import decode, encode
from split_models.recipe_cls import TextDirection
from split_models.recipe_det import TextDetection
from split_models.recipes import Made, recipe
from split_models.task import read_npz

DET, CLS, REC = "ppocr-v4-det", "ppocr-v2-cls", "ppocr-v4-rec"
MODELS = (DET, CLS, REC)
PAGE = "sample-page"
LINES = 6
FLOAT_BYTES = 4


@frozen
class Weighed:
    """One offered cut's int8 form over the real inputs. ratio: float32 bytes over compressed body bytes."""

    model: str
    cut: str
    ratio: float
    error_ratio: float


def weighed(limits: BundleLimits, models: Sequence[str] = MODELS) -> Sequence[Weighed]:
    """Build each model's bundle as a coordinator with the sample page would, then run real inputs through the heads."""
    store = default_store()
    page = store.pull(PAGE).read_bytes()
    found: list[Weighed] = []
    with tempfile.TemporaryDirectory(prefix="midstream-wire-") as folder:
        lines = lines_of(page, store)
        for name in models:
            real = real_inputs(name, page, lines)
            entry = shipped_catalogue()[name]
            # The user's sample of a model without a recipe is every other line; the rest judges.
            given = real[::2] if entry.recipe is None else [page]
            manifest = build_bundle(store.pull(name), entry, Path(folder), samples=given, limits=limits)
            found += _of_bundle(Path(folder) / name, manifest, real)
    return found


def lines_of(page: bytes, store: ModelStore) -> Sequence[bytes]:
    """The longest text lines of the page as pictures, upright, as the detector finds them."""
    import numpy as np

    recipe, entry = TextDetection(), shipped_catalogue()[DET]
    ((name, shape),) = entry.input_shapes.items()
    model = OnnxRuntime().load(store.pull(DET), 0)
    made = recipe.before(page, name, shape)
    boxes = to_array(recipe.after(model.run(made.inputs), made.context)[0]).reshape(-1, 4, 2)
    model.close()
    pixels = decode(page, PAGE)
    crops: list[bytes] = []
    for box in sorted(boxes, key=lambda corners: float(np.ptp(corners[:, 0])), reverse=True)[:LINES]:
        (left, top), (right, bottom) = box.min(axis=0), box.max(axis=0)
        crop = pixels[max(0, int(top)) : int(bottom) + 1, max(0, int(left)) : int(right) + 1]
        crops.append(encode(np.ascontiguousarray(crop)))
    return crops


def real_inputs(name: str, page: bytes, lines: Sequence[bytes]) -> Sequence[bytes]:
    """Pictures for models with a recipe, and a .npz per line for the one without."""
    import numpy as np

    if name == DET:
        return [page]
    if name == CLS:
        return lines
    ((input_name, shape),) = shipped_catalogue()[REC].input_shapes.items()
    found: list[bytes] = []
    for line in lines:
        made = TextDirection().before(line, input_name, shape)  # the same scaling as the recogniser's
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **{input_name: to_array(made.inputs[0])})
        found.append(file.getvalue())
    return found


def _of_bundle(folder: Path, manifest: BundleManifest, real: Sequence[bytes]) -> Sequence[Weighed]:
    inputs = [made.inputs for made in _made(manifest, real)]
    errors = {one.cut: one.error_ratio for one in verify_offered(folder, real) if one.codec == "int8"}
    return [
        Weighed(manifest.model, cut.id, _ratio(folder / cut.head_file, cut, inputs), errors[cut.id])
        for cut in manifest.cuts
        if cut.codec == "int8"
    ]


def _made(manifest: BundleManifest, real: Sequence[bytes]) -> Sequence[Made]:
    ((name, shape),) = manifest.input_shapes.items()
    if manifest.recipe is not None:
        return [recipe(manifest.recipe).before(picture, name, shape) for picture in real]
    return [made for data in real for made in read_npz(data, [TensorSpec(name, "FP32", shape)])]


def _ratio(head_file: Path, cut: CutEntry, inputs: Sequence[Sequence[Tensor]]) -> float:
    """Bytes of the tensors in float32 over bytes of the compressed bodies, header and all."""
    head = OnnxRuntime().load(head_file, 0)
    packed = 0
    for tensors in inputs:
        packed += len(packed_request(list(head.run(tensors))))
    head.close()
    elements = sum(prod(shape) for _, _, shape in cut.crossing)
    return FLOAT_BYTES * elements * len(inputs) / packed
