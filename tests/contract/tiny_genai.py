"""A tiny causal language model with random weights, in the layout that onnxruntime-genai's model builder writes.

Two layers of grouped-query attention with rotary positions, a byte-level tokenizer of some 300 tokens with a piece of
64 bytes, and a chat template. Made anew for each run of the tests (a few milliseconds), so nothing binary is kept.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, save

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, LAYERS = 32, 2, 1, 16, 64, 2
CONTEXT_TOKENS = 2048
SEED = 53
"""With these weights a chat ends after some 30 tokens, other prompts much later."""
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
MERGES = (
    "o r", "w or", "wor d", "Ġ word", "t h", "th e", "Ġ the", "- -", "-- --", "---- ----", "-------- --------",
    "---------------- ----------------", "-------------------------------- --------------------------------",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Array = NDArray[np.float32]


def byte_letters() -> dict[int, str]:
    """The printable letter that byte-level tokenizers write for each byte."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    letters = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in letters:
            letters[byte] = chr(256 + len(letters) - len(printable))
    return letters


def vocabulary() -> dict[str, int]:
    """Token to id: the special ones, 256 bytes, what the merges make."""
    tokens = [*SPECIAL, *(byte_letters()[byte] for byte in range(256)), *(pair.replace(" ", "") for pair in MERGES)]
    return {token: number for number, token in enumerate(tokens)}


def write_model(folder: Path, seed: int = SEED) -> Path:
    """Write model, tokenizer and settings into `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = vocabulary()
    save(_Graph(len(tokens), seed).model(), str(folder / "model.onnx"))
    (folder / "genai_config.json").write_text(json.dumps(_settings(len(tokens))))
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer and how it is used."""
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary())))
    described = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def _settings(size: int) -> dict[str, Any]:
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
        "filename": "model.onnx",
        "head_size": HEAD,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "inputs": {
            "input_ids": "input_ids",
            "attention_mask": "attention_mask",
            "past_key_names": "past_key_values.%d.key",
            "past_value_names": "past_key_values.%d.value",
        },
        "outputs": {
            "logits": "logits",
            "present_key_names": "present.%d.key",
            "present_value_names": "present.%d.value",
        },
    }
    model = {
        "type": "llama",
        "decoder": decoder,
        "vocab_size": size,
        "context_length": CONTEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": [0],
        "pad_token_id": 0,
    }
    return {"model": model, "search": {"max_length": CONTEXT_TOKENS, "past_present_share_buffer": True}}


def _tokenizer(tokens: dict[str, int]) -> dict[str, Any]:
    added = [
        {
            "id": tokens[token], "content": token, "special": True,
            "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        }
        for token in SPECIAL
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": tokens, "merges": list(MERGES),
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": level, "post_processor": level, "decoder": level, "model": model,
    }  # fmt: skip


class _Graph:
    """The decoder as a graph, operator by operator."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._random = np.random.default_rng(seed)
        self._nodes: list[Any] = []
        self._weights: list[Any] = []

    def model(self) -> Any:
        self._lengths()
        x = self._add("Gather", [self._weight("embed", self._size, HIDDEN, scale=1.0), "input_ids"])
        for layer in range(LAYERS):
            x = self._block(x, layer)
        self._add("MatMul", [self._norm(x, "last"), self._head()], output="logits")
        cache = ["batch", KV_HEADS, None, HEAD]
        inputs = [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "new"]),
            helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]),
        ]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", self._size])]
        for layer in range(LAYERS):
            for part in ("key", "value"):
                past, present = f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"
                inputs.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, cache))
                outputs.append(helper.make_tensor_value_info(present, TensorProto.FLOAT, cache))
        graph = helper.make_graph(self._nodes, "tiny", inputs, outputs, self._weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)

    def _head(self) -> str:
        """Weights of the logits: only printable ASCII, the merged tokens and the end mark are ever likely."""
        drawn = self._random.standard_normal((HIDDEN, self._size)) * 0.6
        letters = byte_letters()
        silent = [letters[byte] for byte in range(256) if not 32 <= byte < 127] + [*SPECIAL[1:]]
        tokens = vocabulary()
        drawn[:, [tokens[token] for token in silent]] = 0.0
        return self._constant("head", drawn.astype(np.float32))

    def _block(self, x: str, layer: int) -> str:
        normed = self._norm(x, f"a{layer}")
        q = self._add("MatMul", [normed, self._weight(f"q{layer}", HIDDEN, HEADS * HEAD)])
        k = self._add("MatMul", [normed, self._weight(f"k{layer}", HIDDEN, KV_HEADS * HEAD)])
        v = self._add("MatMul", [normed, self._weight(f"v{layer}", HIDDEN, KV_HEADS * HEAD)])
        past = [f"past_key_values.{layer}.key", f"past_key_values.{layer}.value"]
        attended = f"attended{layer}"
        self._nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                [q, k, v, *past, "lengths", "total", "cosines", "sines"],
                [attended, f"present.{layer}.key", f"present.{layer}.value"],
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=KV_HEADS,
                do_rotary=1,
            )
        )
        mixed = self._add("MatMul", [attended, self._weight(f"o{layer}", HEADS * HEAD, HIDDEN)])
        x = self._add("Add", [x, mixed])
        up = self._add("MatMul", [self._norm(x, f"m{layer}"), self._weight(f"up{layer}", HIDDEN, INNER)])
        down = self._add("MatMul", [self._add("Relu", [up]), self._weight(f"down{layer}", INNER, HIDDEN)])
        return self._add("Add", [x, down])

    def _lengths(self) -> None:
        """Tokens in memory per row, less one, and in all; cosines and sines of the positions."""
        self._constant("one64", np.array(1, np.int64))
        self._constant("axis1", np.array([1], np.int64))
        summed = self._add("ReduceSum", ["attention_mask", "axis1"], keepdims=0)
        self._add("Cast", [self._add("Sub", [summed, "one64"])], output="lengths", to=TensorProto.INT32)
        shape = self._add("Shape", ["attention_mask"])
        self._constant("place1", np.array(1, np.int64))
        total = self._add("Gather", [shape, "place1"], axis=0)
        self._add("Cast", [total], output="total", to=TensorProto.INT32)
        angles = np.outer(np.arange(CONTEXT_TOKENS), 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD))
        self._constant("cosines", np.cos(angles).astype(np.float32))
        self._constant("sines", np.sin(angles).astype(np.float32))

    def _norm(self, x: str, name: str) -> str:
        self._constant(f"norm_{name}", np.ones(HIDDEN, np.float32))
        return self._add("SimplifiedLayerNormalization", [x, f"norm_{name}"], axis=-1, epsilon=1e-5)

    def _weight(self, name: str, rows: int, columns: int, scale: float | None = None) -> str:
        drawn = self._random.standard_normal((rows, columns)) * (scale or rows**-0.5)
        return self._constant(name, drawn.astype(np.float32))

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        self._weights.append(numpy_helper.from_array(values, name))
        return name

    def _add(self, kind: str, inputs: list[str], output: str = "", **attributes: Any) -> str:
        output = output or f"{kind}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output
