"""What the servers of OpenAI's wire form do differently, a row per vendor; after the vendors' public API documents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen


@frozen
class Vendor:
    """One vendor's form of POST chat/completions.

    base_url: where the vendor serves it, without a trailing slash; empty: the operator says. chat_path and the other
    paths stand below it; empty ones do not exist. max_tokens_field: name of the answer's bound.
    system: `anywhere`, or `first`: system turns are joined into one, before all others (chat templates refuse others).
    merge_turns: neighbours of one role are joined (the server wants user and assistant in turn).
    continues: `text` when `continue_mark` on a last assistant turn makes the server go on with it, `no` when nothing
    does, None: ask the server (it is sent `continue_fields`). continue_path: path for that, where it differs.
    zero_temperature: what stands for greedy where 0 is refused. temperature_most, temperature_below: bounds, the second
    one open. stream_usage: takes stream_options. stops: so many stop strings. The flags: fields that are taken at all.
    failing_finishes: finish reasons that stand for a failure. extra: fields sent with every request.
    """

    name: str
    base_url: str = ""
    chat_path: str = "/v1/chat/completions"
    completions_path: str = "/v1/completions"
    models_path: str = "/v1/models"
    embeddings_path: str = "/v1/embeddings"
    max_tokens_field: str = "max_tokens"
    system: Literal["anywhere", "first"] = "anywhere"
    merge_turns: bool = False
    continues: Literal["text", "no", None] = None
    continue_mark: Mapping[str, Any] = field(factory=dict)
    continue_fields: Mapping[str, Any] = field(factory=dict)
    continue_path: str = ""
    temperature_most: float = 2.0
    temperature_below: float | None = None
    zero_temperature: Mapping[str, Any] | None = None
    stream_usage: bool = True
    seed: bool = True
    logit_bias: bool = True
    logprobs: bool = True
    stops: int = 4
    forced_tools: Literal["any", "named", "no"] = "any"
    schemas: bool = True
    images: bool = True
    failing_finishes: frozenset[str] = frozenset()
    extra: Mapping[str, Any] = field(factory=dict)


_TEMPLATE_FIELDS = {"continue_final_message": True, "add_generation_prompt": False}

VENDORS: Mapping[str, Vendor] = {
    vendor.name: vendor
    for vendor in (
        # A server of OpenAI's form of which nothing more is known.
        Vendor("openai_compat", continue_fields=_TEMPLATE_FIELDS),
        Vendor("openai", base_url="https://api.openai.com", max_tokens_field="max_completion_tokens", continues="no"),
        # vLLM: `continue_final_message`; its templates may refuse a system turn that is not the first one.
        Vendor("vllm", continue_fields=_TEMPLATE_FIELDS, system="first"),
        # llama-server: a trailing assistant turn is continued by default, newer builds take vLLM's fields too.
        Vendor("llama_server", continue_fields=_TEMPLATE_FIELDS, system="first"),
        # DashScope's compatible mode. `partial` continues a turn; temperature is in [0, 2).
        Vendor(
            "qwen",
            base_url="https://dashscope.aliyuncs.com/compatible-mode",
            completions_path="",
            system="first",
            continues="text",
            continue_mark={"partial": True},
            temperature_below=2.0,
            logit_bias=False,
            forced_tools="named",
        ),
        # DeepSeek: `prefix` continues a turn, in the beta API only; the reasoner wants user and assistant in turn.
        Vendor(
            "deepseek",
            base_url="https://api.deepseek.com",
            chat_path="/chat/completions",
            completions_path="",
            models_path="/models",
            embeddings_path="",
            merge_turns=True,
            continues="text",
            continue_mark={"prefix": True},
            continue_path="/beta/chat/completions",
            seed=False,
            logit_bias=False,
            schemas=False,
            images=False,
            failing_finishes=frozenset({"insufficient_system_resource"}),
        ),
        # Zhipu's GLM: temperature in (0, 1], greedy by do_sample; tools are chosen by the model only.
        Vendor(
            "zhipu",
            base_url="https://open.bigmodel.cn/api/paas/v4",
            chat_path="/chat/completions",
            completions_path="",
            models_path="",
            embeddings_path="/embeddings",
            system="first",
            continues="no",
            temperature_most=1.0,
            zero_temperature={"do_sample": False},
            stream_usage=False,
            seed=False,
            logit_bias=False,
            logprobs=False,
            stops=1,
            forced_tools="no",
            schemas=False,
            failing_finishes=frozenset({"network_error"}),
        ),
        # Moonshot's Kimi: `partial` continues a turn; temperature in [0, 1]; usage stands inside the last choice.
        Vendor(
            "moonshot",
            base_url="https://api.moonshot.cn",
            completions_path="",
            embeddings_path="",
            continues="text",
            continue_mark={"partial": True},
            temperature_most=1.0,
            seed=False,
            logit_bias=False,
            logprobs=False,
            forced_tools="no",
        ),
    )
}
