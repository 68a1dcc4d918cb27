"""Raw loops of the two llama.cpp bindings, each in a child process that runs one generation per line of input.

The peers that `benchmarks.text_overhead` measures against: nothing between the binding and the clock.
Input lines are JSON {"prompt": [ids...], "tokens": n}; output lines JSON {"ttft_s", "tokens_per_s", "tokens"}.
With 0 tokens nothing is generated: the answer comes at once.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CONTEXT_TOKENS = 1024
Loop = Callable[[Sequence[int], int], list[float]]
"""(prompt ids, tokens wanted) -> when each token was there, in perf_counter seconds."""


def llama_cpp_loop(model: str, threads: int) -> Loop:
    """llama-cpp-python: its own generate(), greedy."""
    from llama_cpp import Llama

    llama = Llama(model, n_ctx=CONTEXT_TOKENS, n_threads=threads, n_threads_batch=threads, verbose=False)

    def loop(prompt: Sequence[int], count: int) -> list[float]:
        llama.reset()
        made: list[float] = []
        for token in llama.generate(list(prompt), temp=0.0, repeat_penalty=1.0, reset=True):
            made.append(time.perf_counter())
            if len(made) == count or token == llama.token_eos():
                break
        return made

    return loop


def llama_server_loop(model: str, threads: int) -> Loop:
    """xllamacpp: the embedded server's completion call with a callback, greedy."""
    import xllamacpp

    params: Any = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, CONTEXT_TOKENS, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity, params.ui, params.fit_params, params.cache_ram_mib = 0, False, False, 0
    folder = tempfile.mkdtemp(prefix="midstream-raw-")
    params.hostnames, params.port = [str(Path(folder) / "raw.sock")], 0
    server = xllamacpp.Server(params)

    def loop(prompt: Sequence[int], count: int) -> list[float]:
        made: list[float] = []

        def on_chunk(chunk: Any) -> bool:
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                made.append(time.perf_counter())
            return False

        body = {"prompt": list(prompt), "n_predict": count, "stream": True, "temperature": 0, "top_k": 1}
        server.handle_completions({**body, "cache_prompt": False}, on_chunk)
        return made

    return loop


def tokenizer(model: str) -> Callable[[str], list[int]]:
    """Ids of a text, from the GGUF alone (either binding would do; this one is quick to load)."""
    from llama_cpp import Llama

    llama = Llama(model, vocab_only=True, verbose=False)
    return lambda text: list(llama.tokenize(text.encode(), special=True))


def main() -> int:
    """`python -m benchmarks.raw_loops llama_cpp|llama_server MODEL THREADS`."""
    binding, model, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # native libraries print to standard output
    loop = (llama_cpp_loop if binding == "llama_cpp" else llama_server_loop)(model, threads)
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        if not task["tokens"]:  # how long it takes to be heard, and to be answered
            print(json.dumps({"ttft_s": 0.0, "tokens_per_s": 0.0, "tokens": 0}), file=out, flush=True)
            continue
        started_s = time.perf_counter()
        made = loop(task["prompt"], task["tokens"])
        rate = (len(made) - 1) / (made[-1] - made[0]) if len(made) > 1 else 0.0
        answer = {"ttft_s": made[0] - started_s, "tokens_per_s": rate, "tokens": len(made)}
        print(json.dumps(answer), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
