"""Preparing and cutting TFLite files, real and hand-made; what happens with damaged files and those that stay whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ai_edge_litert import schema_py_generated as schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.verify import verify_offered
from engines.arrays import to_array, to_tensor
from engines.digest import file_sha256
from engines.tflite import TfliteRuntime
from protocol.errors import ConfigError, EngineError, Unsupported
from protocol.models import CatalogueEntry, Source
from split_models.bundle import BundleLimits, build_bundle
from split_models.candidates import candidates
from split_models.codec import FP16, INT8, RAW, affine_for, halve, quantise
from split_models.cuts import Cut, single_tensor_cuts
from split_models.graph import GraphTensor
from split_models.partition_tflite import Partitioner
from split_models.prepare_tflite import Prepared, prepare
from split_models.tflite_files import indices, operator_name, parse_model, to_bytes
from split_models.tflite_graph import index_bounds
from tests.unit.split_models.tflite_models import Drawn, chain, int8_net

FACE = "face-short-range"
SHAPE = (1, 128, 128, 3)


@pytest.fixture(scope="module")
def face(model_file: Callable[[str], Path]) -> Prepared:
    return prepare(model_file(FACE), {"input": SHAPE})


@pytest.fixture
def run(tmp_path: Path) -> Callable[[bytes, Mapping[str, Any]], dict[str, np.ndarray]]:
    """Run a file's bytes on arrays by name."""

    def once(data: bytes, feed: Mapping[str, Any]) -> dict[str, np.ndarray]:
        file = tmp_path / "part.tflite"
        file.write_bytes(data)
        model = TfliteRuntime().load(file, 1)
        try:
            return {t.name: to_array(t) for t in model.run([to_tensor(name, x) for name, x in feed.items()])}
        finally:
            model.close()

    return once


def picture(seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, SHAPE).astype(np.float32)


def cut_at(graph_tensor: GraphTensor, *more: GraphTensor) -> Cut:
    return Cut("x", 0, (graph_tensor, *more), 0.0)


def test_the_prepared_file_answers_as_the_original(face: Prepared, model_file: Callable[[str], Path], run: Any) -> None:
    whole, prepared = run(model_file(FACE).read_bytes(), {"input": picture()}), run(face.data, {"input": picture()})
    assert whole.keys() == prepared.keys() == {"regressors", "classificators"}
    assert all(np.array_equal(whole[name], prepared[name]) for name in whole)


def test_the_digest_is_the_same_every_time(face: Prepared, model_file: Callable[[str], Path]) -> None:
    assert prepare(model_file(FACE), {}).digest == face.digest
    assert to_bytes(parse_model(face.data, "again")) == face.data


def test_weights_are_aligned_for_the_kernels(face: Prepared) -> None:
    view = schema.Model.GetRootAs(face.data, 0)
    data = np.frombuffer(face.data, np.uint8)
    starts = [view.Buffers(k).DataAsNumpy() for k in range(view.BuffersLength()) if view.Buffers(k).DataLength()]
    assert len(starts) > 40
    assert all((part.__array_interface__["data"][0] - data.__array_interface__["data"][0]) % 16 == 0 for part in starts)


@pytest.mark.parametrize("place", [0, 9, -1])
def test_head_and_tail_answer_bit_for_bit_as_the_whole(face: Prepared, run: Any, place: int) -> None:
    parts = Partitioner(face).split(single_tensor_cuts(face.graph)[place], RAW)
    answer = run(parts.tail, run(parts.head, {"input": picture()}))
    whole = run(face.data, {"input": picture()})
    assert list(answer) == list(whole)
    assert all(np.array_equal(answer[name], whole[name]) for name in whole)


@pytest.mark.parametrize("place", [0, 9, -1])
def test_a_head_is_a_model_of_its_own_that_holds_nothing_of_the_tail(face: Prepared, place: int) -> None:
    """Invoke runs all of a file, whatever was asked for: what the device should not compute must not be in it."""
    parts = Partitioner(face).split(single_tensor_cuts(face.graph)[place], RAW)
    made = []
    for data in (parts.head, parts.tail, face.data):
        main = read(data).subgraphs[0]
        made.append({main.tensors[i].name for o in main.operators for i in indices(o.outputs)})
    constant = {name.encode() for name in (t.decode() for t in made[2]) if name not in computed(face)}
    assert made[0] | made[1] == made[2]
    assert made[0] & made[1] <= constant
    assert made[1] - constant, "there is no tail"
    assert len(parts.head) + len(parts.tail) < 1.2 * len(face.data)


def test_no_operator_of_a_head_reads_what_crosses(face: Prepared) -> None:
    """A delegate may hand out a wrong value for an output that is also read inside."""
    for cut in single_tensor_cuts(face.graph):
        main = read(Partitioner(face).split(cut, RAW).head).subgraphs[0]
        (output,) = indices(main.outputs)
        assert all(output not in indices(operator.inputs) for operator in main.operators)


def computed(prepared: Prepared) -> set[str]:
    return {name for node in prepared.graph.nodes for name in node.outputs}


def read(data: bytes) -> Any:
    return parse_model(data, "part")


def test_what_makes_constants_stands_on_both_sides(tmp_path: Path, run: Any) -> None:
    """Half-float weights that both sides read: the tail that lacks their DEQUANTIZE has an input without data."""
    drawn = Drawn()
    x, a, y, wide = (drawn.tensor(name, (1, 4)) for name in ("x", "a", "y", "wide"))
    half = drawn.weight("half", np.array([[1, 2, 3, 4]], np.float16))
    drawn.add("DEQUANTIZE", [half], [wide], "DequantizeOptions")
    drawn.add("MUL", [x, wide], [a], "MulOptions")
    drawn.add("ADD", [a, wide], [y], "AddOptions")
    drawn.ports([x], [y])
    prepared = prepare(drawn.save(tmp_path / "m.tflite"), {})
    (cut,) = single_tensor_cuts(prepared.graph)
    assert [node.op for node in prepared.graph.nodes] == ["MUL", "ADD"]
    parts = Partitioner(prepared).split(cut, RAW)
    for data, own in ((parts.head, "MUL"), (parts.tail, "ADD")):
        model = read(data)
        assert [operator_name(model, o) for o in model.subgraphs[0].operators] == ["DEQUANTIZE", own]
    values = np.array([[1, 1, 1, 2]], np.float32)
    assert run(parts.tail, run(parts.head, {"x": values}))["y"].tolist() == [[2, 4, 6, 12]]


def test_outputs_for_calibration_are_what_heads_give(face: Prepared, run: Any) -> None:
    """Tensors inside are read as true outputs, never by preserving all tensors, which may change what is computed."""
    partitioner, cuts = Partitioner(face), single_tensor_cuts(face.graph)
    chosen = [cuts[0], cuts[11], cuts[-1]]
    seen = run(partitioner.with_outputs([cut.crossing[0].name for cut in chosen]), {"input": picture()})
    for cut in chosen:
        name = cut.crossing[0].name
        assert np.array_equal(seen[name], run(partitioner.split(cut, RAW).head, {"input": picture()})[name])


@pytest.mark.parametrize("per_channel", [False, True])
def test_int8_in_the_graph_is_the_arithmetic_of_the_codec(face: Prepared, run: Any, per_channel: bool) -> None:
    cut, partitioner = single_tensor_cuts(face.graph)[6], Partitioner(face)
    name = cut.crossing[0].name
    activation = run(partitioner.split(cut, RAW).head, {"input": picture()})[name]
    if per_channel:
        rows = activation.reshape(-1, activation.shape[-1])
        affine = affine_for(rows.min(0).tolist(), rows.max(0).tolist(), axis=-1)
    else:
        affine = affine_for([float(activation.min())], [float(activation.max())])
    parts = partitioner.split(cut, INT8, {name: affine})
    codes = run(parts.head, {"input": picture()})
    assert [(k, v.dtype.name, v.shape) for k, v in codes.items()] == [(parts.crossing[0][0], "uint8", activation.shape)]
    sent = codes[parts.crossing[0][0]]
    assert np.abs(sent.astype(int) - quantise(activation, affine).astype(int)).max() <= 1
    answer, whole = run(parts.tail, codes), run(face.data, {"input": picture()})
    assert all(np.abs(answer[k] - whole[k]).max() < 0.05 * np.abs(whole[k]).max() for k in whole)


def test_fp16_stays_finite_and_is_the_arithmetic_of_the_codec(tmp_path: Path, run: Any) -> None:
    prepared = prepare(chain("x", "a", "y").save(tmp_path / "m.tflite"), {})
    (cut,) = single_tensor_cuts(prepared.graph)
    parts = Partitioner(prepared).split(cut, FP16)
    x = np.array([[1.0003, -1e30, 1e30, 6e-8]], np.float32)
    halves = run(parts.head, {"x": x})
    assert parts.crossing == (("a__wire", "FP16", (1, 4)),)
    assert np.array_equal(halves["a__wire"], halve(-x))
    assert np.array_equal(run(parts.tail, halves)["y"], -halves["a__wire"].astype(np.float32))


def test_a_quantised_answer_keeps_its_name(tmp_path: Path, run: Any) -> None:
    prepared = prepare(chain("x", "a", "y").save(tmp_path / "m.tflite"), {})
    (cut,) = single_tensor_cuts(prepared.graph)
    one = affine_for([-1.0], [1.0])
    parts = Partitioner(prepared).split(cut, INT8, {"a": one}, one)
    codes = run(parts.tail, run(parts.head, {"x": np.array([[-1, -0.5, 0, 1]], np.float32)}))
    assert list(codes) == ["y"]
    wanted = quantise(np.array([[-1, -0.5, 0, 1]], np.float32), one)
    assert np.abs(codes["y"].astype(int) - wanted.astype(int)).max() <= 1
    output = read(parts.tail).subgraphs[0].tensors[-1]
    assert (output.name, output.type) == (b"y", schema.TensorType.UINT8)


def test_int8_models_hand_over_int8(tmp_path: Path, run: Any) -> None:
    """A quarter of the bytes for nothing: the tensor's own scale and zero point travel in both files."""
    prepared = prepare(int8_net().save(tmp_path / "m.tflite"), {})
    x = np.random.default_rng(3).integers(-128, 128, (1, 16, 16, 3)).astype(np.int8)
    whole, cuts = run(prepared.data, {"picture": x})["scores"], single_tensor_cuts(prepared.graph)
    assert len(cuts) == 7
    assert len(set(whole.reshape(-1).tolist())) > 2, "the scores say nothing"
    for cut in cuts:
        parts = Partitioner(prepared).split(cut, RAW)
        assert parts.crossing == ((cut.crossing[0].name, "INT8", cut.crossing[0].shape),)
        assert np.array_equal(run(parts.tail, run(parts.head, {"picture": x}))["scores"], whole)
        inside = read(parts.tail).subgraphs[0]
        assert np.allclose(inside.tensors[inside.inputs[0]].quantization.scale, 0.05)
    for codec in (INT8, FP16):
        with pytest.raises(Unsupported):
            Partitioner(prepared).split(cuts[0], codec)


def test_a_bundle_of_an_int8_model_offers_its_tensors_as_they_are(tmp_path: Path) -> None:
    file = int8_net().save(tmp_path / "net.tflite")
    entry = CatalogueEntry("net", "tflite", file.name, file_sha256(file), file.stat().st_size, Source("file"))
    manifest = build_bundle(file, entry, tmp_path / "out", limits=BundleLimits(max_cuts=3, threads=1))
    assert [cut.codec for cut in manifest.cuts] == [RAW] * 3
    for cut in manifest.cuts:
        ((_, datatype, shape),) = cut.crossing
        assert (datatype, cut.wire_bytes) == ("INT8", prod(shape))
    sent = [cut.wire_bytes for cut in manifest.cuts]
    assert sent == sorted(sent, reverse=True)
    assert all(one.max_relative_error == 0 for one in verify_offered(tmp_path / "out" / "net"))


@st.composite
def drawn_graphs(draw: st.DrawFn) -> Drawn:
    """Additions, products and signs over two inputs, weights and what is made of weights alone, in any wiring."""
    drawn = Drawn()
    known = [drawn.tensor("x", (1, 4)), drawn.tensor("z", (1, 4))]
    known.append(drawn.weight("w", np.array([[1, -2, 0.5, 3]], np.float32)))
    made = []
    for place in range(draw(st.integers(3, 9))):
        name = draw(st.sampled_from(["NEG", "ABS", "ADD", "MUL"]))
        reads = [draw(st.sampled_from(known[-5:] + known[:3])) for _ in range(1 + (name in ("ADD", "MUL")))]
        made.append(drawn.tensor(f"t{place}", (1, 4)))
        drawn.add(name, reads, [made[-1]], f"{name.capitalize()}Options")
        known.append(made[-1])
    early = draw(st.sets(st.sampled_from(made[:-1]), max_size=2))
    drawn.ports([0, 1], [made[-1], *sorted(early)])
    return drawn


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=drawn_graphs())
def test_every_cut_of_any_graph_gives_the_whole_answer(tmp_path: Path, run: Any, drawn: Drawn) -> None:
    prepared = prepare(drawn.save(tmp_path / "m.tflite"), {})
    feed = {"x": np.array([[1, 2, -3, 0.5]], np.float32), "z": np.array([[-1, 0.25, 2, 7]], np.float32)}
    whole, partitioner = run(prepared.data, feed), Partitioner(prepared)
    for cut in candidates(prepared.graph):
        parts = partitioner.split(cut, RAW)
        answer = run(parts.tail, run(parts.head, feed))
        assert list(answer) == list(whole), cut
        assert all(np.array_equal(answer[name], whole[name]) for name in whole), cut


# -- names and shapes ------------------------------------------------------------------------------------------------


def test_names_may_repeat_or_be_empty(tmp_path: Path, run: Any) -> None:
    prepared = prepare(chain("x", "x", None, "", "x").save(tmp_path / "m.tflite"), {})
    made = [name for node in prepared.graph.nodes for name in node.outputs]
    assert made == ["x_1", "tensor_2", "tensor_3", "x_4"]
    assert [prepared.names[name] for name in made] == ["x", "", "", "x"]
    x = np.array([[1, 2, 3, 4]], np.float32)
    for cut in single_tensor_cuts(prepared.graph):
        parts = Partitioner(prepared).split(cut, RAW)
        assert run(parts.tail, run(parts.head, {"x": x}))["x_4"].tolist() == x.tolist()


def test_the_adapter_gives_ports_the_same_names_as_preparing_does(tmp_path: Path) -> None:
    """An unprepared file is served under the names that its prepared form will have."""
    drawn = Drawn()
    x, y, z = (drawn.tensor("", (1, 2)) for _ in range(3))
    drawn.add("ADD", [x, y], [z], "AddOptions")
    drawn.ports([x, y], [z])
    file = drawn.save(tmp_path / "m.tflite")
    model, graph = TfliteRuntime().load(file, 1), prepare(file, {}).graph
    assert [s.name for s in model.inputs] == [t.name for t in graph.inputs] == ["tensor_0", "tensor_1"]
    assert [s.name for s in model.outputs] == [t.name for t in graph.outputs] == ["tensor_2"]
    answer = model.run([to_tensor("tensor_0", np.ones((1, 2), "f4")), to_tensor("tensor_1", np.full((1, 2), 2, "f4"))])
    assert to_array(answer[0]).tolist() == [[3, 3]]


def free_batch() -> Drawn:
    """A free first size whose value is read by SHAPE and sizes a RESHAPE, as converters write it."""
    drawn = Drawn()
    x, a, b, y = (drawn.tensor(n, (1, 4), signature=(-1, 4)) for n in ("x", "a", "b", "y"))
    begin, end, step = (drawn.weight(n, np.array([k], np.int32)) for n, k in (("from", 0), ("to", 1), ("by", 1)))
    four, sizes = drawn.weight("four", np.array(4, np.int32)), drawn.tensor("sizes", (2,), "int32")
    shape, rows = drawn.tensor("shape", (2,), "int32"), drawn.tensor("rows", (), "int32")
    drawn.add("NEG", [x], [a], "NegOptions")
    drawn.add("SHAPE", [x], [shape], "ShapeOptions", outType=schema.TensorType.INT32)
    drawn.add("STRIDED_SLICE", [shape, begin, end, step], [rows], "StridedSliceOptions", shrinkAxisMask=1)
    drawn.add("PACK", [rows, four], [sizes], "PackOptions", valuesCount=2)
    drawn.add("NEG", [a], [b], "NegOptions")
    drawn.add("RESHAPE", [b, sizes], [y], "ReshapeOptions")
    drawn.ports([x], [y])
    return drawn


def test_free_sizes_are_fixed_and_the_chain_from_shape_is_folded(tmp_path: Path, run: Any) -> None:
    prepared = prepare(free_batch().save(tmp_path / "m.tflite"), {"x": (3, 4)})
    assert [node.op for node in prepared.graph.nodes] == ["NEG", "NEG", "RESHAPE"]
    assert {tensor.shape for tensor in (*prepared.graph.inputs, *prepared.graph.outputs)} == {(3, 4)}
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    cuts = single_tensor_cuts(prepared.graph)
    assert [cut.crossing[0].shape for cut in cuts] == [(3, 4), (3, 4)]
    for cut in cuts:
        parts = Partitioner(prepared).split(cut, RAW)
        assert np.array_equal(run(parts.tail, run(parts.head, {"x": x}))["y"], x)


def test_tensors_whose_size_depends_on_values_are_not_cut(tmp_path: Path) -> None:
    drawn = Drawn()
    x, a, b, y = (drawn.tensor(name, (1, 4)) for name in "xaby")
    sizes = drawn.tensor("sizes", (2,), "int32")
    drawn.add("RESHAPE", [x, sizes], [a], "ReshapeOptions")
    drawn.add("NEG", [a], [b], "NegOptions")
    one = drawn.weight("one", np.array([1, 4], np.int32))
    drawn.add("RESHAPE", [b, one], [y], "ReshapeOptions", newShape=[1, 4])
    drawn.ports([x, sizes], [y])
    with pytest.raises(EngineError, match="no fixed shape"):
        prepare(drawn.save(tmp_path / "m.tflite"), {})


@pytest.mark.parametrize(
    "shapes", [{"y": SHAPE}, {"input": (1, 3)}, {"input": (1, 0, 128, 3)}, {"input": (1, -1, 9, 3)}]
)
def test_input_shapes_that_do_not_fit(model_file: Callable[[str], Path], shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError) as raised:
        prepare(model_file(FACE), shapes)
    assert raised.value.field == "input_shapes"


def test_shapes_that_the_graph_cannot_take_are_refused_by_the_runtime(model_file: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError, match="cannot be worked out"):
        prepare(model_file(FACE), {"input": (1, 128, 128, 4)})


# -- several tensors, bodies, state ----------------------------------------------------------------------------------


def forked() -> Drawn:
    """x -> a, b; a output is made early; y = a + b + x."""
    drawn = Drawn()
    x, early, b, c, y = (drawn.tensor(name, (1, 4)) for name in ("x", "early", "b", "c", "y"))
    drawn.add("NEG", [x], [early], "NegOptions")
    drawn.add("SQUARE", [early], [b], "SquareOptions")
    drawn.add("ADD", [b, early], [c], "AddOptions")
    drawn.add("ADD", [c, x], [y], "AddOptions")
    drawn.ports([x], [y, early])
    return drawn


@pytest.mark.parametrize("codec", [RAW, FP16, INT8])
def test_inputs_and_outputs_of_the_model_may_cross_under_other_names(tmp_path: Path, run: Any, codec: str) -> None:
    prepared = prepare(forked().save(tmp_path / "m.tflite"), {})
    tensors = [prepared.graph.tensors[name] for name in ("b", "early", "x")]
    affine = {tensor.name: affine_for([-4.0], [16.0]) for tensor in tensors}
    parts = Partitioner(prepared).split(cut_at(*tensors), codec, affine)
    x = np.array([[1, 2, -3, 0.5]], np.float32)
    answer, whole = run(parts.tail, run(parts.head, {"x": x})), run(prepared.data, {"x": x})
    assert len({name for name, _, _ in parts.crossing} - {"x", "early", "y"}) == 3
    assert list(answer) == list(whole) == ["y", "early"]
    tolerance = 0.0 if codec == RAW else 0.2
    assert all(np.allclose(answer[name], whole[name], atol=tolerance) for name in whole)


def test_a_cut_that_does_not_separate_is_refused(tmp_path: Path) -> None:
    prepared = prepare(forked().save(tmp_path / "m.tflite"), {})
    with pytest.raises(EngineError, match="also reads the model's input 'x'"):
        Partitioner(prepared).split(cut_at(prepared.graph.tensors["c"]), RAW)
    with pytest.raises(EngineError, match="no tensor"):
        Partitioner(prepared).with_outputs(["nothing"])


def branching() -> Drawn:
    """y = NEG of (a if flag else a * a), a = NEG x."""
    drawn = Drawn()
    x, a, b, y = (drawn.tensor(name, (1, 4)) for name in ("x", "a", "b", "y"))
    flag = drawn.tensor("flag", (1,), "bool")
    drawn.add("NEG", [x], [a], "NegOptions")
    drawn.add("IF", [flag, a], [b], "IfOptions", thenSubgraphIndex=3, elseSubgraphIndex=2)
    drawn.add("NEG", [b], [y], "NegOptions")
    drawn.ports([x, flag], [y])
    for name, options in (("EXP", "ExpOptions"), ("SQUARE", "SquareOptions"), ("ABS", "AbsOptions")):
        drawn.graph()
        given, made = drawn.tensor("given", (1, 4)), drawn.tensor("made", (1, 4))
        drawn.add(name, [given], [made], options)
        drawn.ports([given], [made])
    return drawn


@pytest.mark.parametrize("flag", [True, False])
def test_bodies_stay_whole_and_go_with_their_operator(tmp_path: Path, run: Any, flag: bool) -> None:
    prepared = prepare(branching().save(tmp_path / "m.tflite"), {})
    assert [node.op for node in prepared.graph.nodes] == ["NEG", "IF", "NEG"]
    x, partitioner = np.array([[1, 2, -3, 0.5]], np.float32), Partitioner(prepared)
    feed = {"x": x, "flag": np.array([flag])}
    wanted = -(np.abs(-x) if flag else x * x)
    assert np.array_equal(run(prepared.data, feed)["y"], wanted)
    early = partitioner.split(cut_at(*(prepared.graph.tensors[name] for name in ("a", "flag"))), RAW)
    late = partitioner.split(cut_at(prepared.graph.tensors["b"]), RAW)
    assert [len(read(part).subgraphs) for part in (early.head, early.tail, late.head, late.tail)] == [1, 3, 3, 1]
    assert np.array_equal(run(early.tail, run(early.head, feed))["y"], wanted)
    assert np.array_equal(run(late.tail, run(late.head, feed))["y"], wanted)


def test_graphs_that_keep_a_state_are_not_cut(tmp_path: Path) -> None:
    drawn = chain("x", "a", "y")
    drawn.last.tensors[1].isVariable = True
    with pytest.raises(EngineError, match="keeps a state") as raised:
        prepare(drawn.save(tmp_path / "m.tflite"), {})
    assert "whole" in raised.value.next_step


def test_custom_operators_pass_through(tmp_path: Path) -> None:
    drawn = chain("x", "a", "b", "y")
    drawn.model.operatorCodes[1].builtinCode = drawn.model.operatorCodes[1].deprecatedBuiltinCode = 32
    drawn.model.operatorCodes[1].customCode = "Mine"
    custom = drawn.last.operators[1]
    custom.builtinOptionsType, custom.builtinOptions, custom.customOptions = 0, None, [1, 2, 3]
    prepared = prepare(drawn.save(tmp_path / "m.tflite"), {})
    assert [node.op for node in prepared.graph.nodes] == ["NEG", "CUSTOM:Mine", "NEG"]
    tail = read(Partitioner(prepared).split(single_tensor_cuts(prepared.graph)[0], RAW).tail)
    assert operator_name(tail, tail.subgraphs[0].operators[0]) == "CUSTOM:Mine"
    assert bytes(tail.subgraphs[0].operators[0].customOptions) == b"\x01\x02\x03"


def test_signatures_and_foreign_metadata_do_not_stay(tmp_path: Path) -> None:
    """A signature names tensors by index: kept, it would run another part of the file, or none."""
    drawn = chain("x", "a", "b", "y")
    signature, ends = schema.SignatureDefT(), []
    for tensor in (0, 3):
        ends.append(schema.TensorMapT())
        ends[-1].name, ends[-1].tensorIndex = "port", tensor
    signature.signatureKey, signature.inputs, signature.outputs = "serving_default", ends[:1], ends[1:]
    drawn.model.signatureDefs, drawn.model.metadata = [signature], []
    for name in ("TFLITE_METADATA", "min_runtime_version"):
        entry, buffer = schema.MetadataT(), schema.BufferT()
        buffer.data = name.encode()
        drawn.model.buffers.append(buffer)
        entry.name, entry.buffer = name, len(drawn.model.buffers) - 1
        drawn.model.metadata.append(entry)
    prepared = prepare(drawn.save(tmp_path / "m.tflite"), {})
    parts = Partitioner(prepared).split(single_tensor_cuts(prepared.graph)[0], RAW)
    for data in (prepared.data, parts.head, parts.tail):
        view = schema.Model.GetRootAs(data, 0)
        assert view.SignatureDefsLength() == 0
        assert [view.Metadata(k).Name() for k in range(view.MetadataLength())] == [b"min_runtime_version"]
        assert bytes(view.Buffers(view.Metadata(0).Buffer()).DataAsNumpy()) == b"min_runtime_version"
        assert b"TFLITE_METADATA" not in data


def test_tables_that_inputs_index_are_known(tmp_path: Path) -> None:
    """Sampled ids must not point behind a table."""
    drawn = Drawn()
    ids, made, table = drawn.tensor("ids", (1, 3), "int32"), drawn.tensor("y", (1, 3, 2)), np.zeros((7, 2), np.float32)
    flat = drawn.tensor("flat", (1, 3), "int32")
    drawn.add("RESHAPE", [ids, drawn.weight("sizes", np.array([1, 3], np.int32))], [flat], "ReshapeOptions")
    drawn.add("GATHER", [drawn.weight("table", table), flat], [made], "GatherOptions")
    drawn.ports([ids], [made])
    prepared = prepare(drawn.save(tmp_path / "m.tflite"), {})
    assert index_bounds(prepared.model) == {"ids": 7}
    assert prepared.graph.nodes[1].weight_bytes == table.nbytes
