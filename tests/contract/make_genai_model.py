"""Makes tests/contract/genai_model: a tiny Llama with random weights, built by onnxruntime-genai's own model builder.

    python -m tests.contract.make_genai_model FOLDER

Needs what the builder needs (`pip install torch transformers onnx onnx-ir onnxruntime-genai`), none of which a test
run does: the folder is kept, 145 kB. Nothing in it comes from elsewhere: the weights are drawn here (see SEED), and the
tokenizer is the one of tests/contract/tiny_genai.py. int4 on the CPU is what the builder is mostly used for: packed
weights, the activation and rotary tables of a real Llama, tensors in a file beside the graph (model.onnx.data).

Kept as made with onnxruntime-genai 0.18.0, torch 2.13.0 and transformers 5.24.0.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.contract.tiny_genai import SPECIAL, byte_letters, vocabulary, write_tokenizer

BUILT_MODEL = Path(__file__).parent / "genai_model"
SEED = 58
"""With these weights a chat ends after some 60 tokens, other prompts later."""
CONTEXT_TOKENS = 1024
HEAD_SCALE = 0.6
"""Standard deviation of the weights that make logits: large enough that the greedy token is clear."""


def settings() -> dict[str, Any]:
    """Of a Llama with two layers and grouped-query attention."""
    return {
        "vocab_size": len(vocabulary()),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_TOKENS,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def silent_ids() -> list[int]:
    """Tokens that are never likely: bytes that are no printable ASCII, and all marks but that of the end."""
    letters, tokens = byte_letters(), vocabulary()
    return [tokens[name] for name in (*(letters[byte] for byte in range(256) if not 32 <= byte < 127), *SPECIAL[1:])]


def write_checkpoint(folder: Path, seed: int) -> None:
    """A Hugging Face checkpoint: drawn weights, settings, tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**settings()))
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim == 2:
                columns = 1 if "embed" in name else weights.shape[1]
                weights.normal_(0.0, HEAD_SCALE if "lm_head" in name else columns**-0.5)
        model.lm_head.weight[silent_ids()] = 0.0
    model.save_pretrained(folder)
    write_tokenizer(folder)
    described = json.loads((folder / "tokenizer_config.json").read_text())
    # Without these the loader invents an <|endoftext|> beyond the vocabulary.
    described |= dict.fromkeys(("bos_token", "unk_token", "pad_token"), SPECIAL[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(described))


def build(folder: Path, seed: int = SEED, precision: str = "int4") -> Path:
    """Draw a checkpoint and let the builder write its model into `folder`; returns it."""
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-p", precision, "-e", "cpu"]
    with TemporaryDirectory() as work:
        checkpoint = Path(work, "checkpoint")
        checkpoint.mkdir()
        write_checkpoint(checkpoint, seed)
        subprocess.run([*command, "-i", checkpoint, "-o", folder, "-c", Path(work, "cache")], check=True)
    return folder


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
