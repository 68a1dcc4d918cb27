"""How hard a prompt is, from 0 to 1: by its length, turns, maths, code, and words that ask for reasoning. Pure.

No model is asked: a few words weigh, in English and Chinese, and some of them (`time complexity`, `prove`) make a
prompt hard however short it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from attrs import frozen

from gateway.prompt_features import hashed

KINDS = ("math", "code", "reasoning", "hard", "simple", "parts")

HARD_FLOOR = 0.8
"""What a hard mark makes a prompt at least."""

MARKS: Mapping[str, str] = {
    "math": (
        "solve|equation|integral|derivative|matrix|probability|theorem|polynomial|algebra|geometry|logarithm|modulo|"
        "eigenvalue|how many|how much|percent|calculate|compute|average speed|sum of|"
        "方程|积分|导数|矩阵|概率|定理|几何|函数|求解|计算|多少|平均|百分"
    ),
    "code": (
        "` `|def|class|function|import|return|python|javascript|typescript|java|rust|golang|sql|regex|algorithm|"
        "debug|compile|exception|stack trace|refactor|unit test|api|"
        "代码|函数|算法|编程|脚本|接口|报错|正则|实现"
    ),
    "reasoning": (
        "why|explain|step by|compare|trade off|tradeoff|trade|analyze|analyse|design|architecture|root cause|infer|"
        "deduce|evaluate|strategy|implications|optimize|optimise|justify|plan|diagnose|if and|"
        "为什|为何|推理|推导|比较|权衡|逐步|步步|分析|设计|架构|根因|评估|策略|优化|论证|方案|推断"
    ),
    "hard": (
        "time complexity|space complexity|big o|complexity of|prove|proof|amortized|invariant|deadlock|race condition|"
        "np hard|np complete|undecidable|counterexample|induction|lemma|closed form|lower bound|upper bound|converge|"
        "杂度|证明|死锁|竞态|收敛|纳法|反例|下界|上界|通项"
    ),
    "simple": (
        "summarize|summarise|summary|translate|classify|extract|hello|hi|thanks|rewrite|spell|list the|name the|"
        "概括|总结|摘要|翻译|分类|提取|抽取|你好|谢谢|改写|润色"
    ),
    "parts": (
        "and then|also|finally|must|constraint|requirements|at least|at most|first|second|"
        "并且|同时|然后|最后|必须|要求|不超|至少"
    ),
}  # fmt: skip


@frozen
class Estimate:
    """complexity: 0 to 1. hard: one of the marks that make a prompt hard whatever its length."""

    complexity: float
    hard: bool


def estimate(marks: Sequence[int], prompt_tokens: int, turns: int, tools: int = 0) -> Estimate:
    """The estimate for a request.

    Args:
        marks: how many of each of KINDS stand in the last turn, where the question is.
        prompt_tokens: of the whole request, roughly.
        turns: of the user.
        tools: that are offered.
    """
    maths, code, reasoning, hard, simple, parts = marks
    score = (
        0.08
        + _grows(prompt_tokens, 64, 8192) * 0.45
        + min(turns - 1, 6) * 0.02
        + min(maths, 3) * 0.13
        + min(code, 4) * 0.08
        + min(reasoning, 3) * 0.18
        + min(parts, 4) * 0.03
        + min(tools, 5) * 0.03
        - min(simple, 2) * 0.10
    )
    score = max(score, HARD_FLOOR) if hard else score
    return Estimate(min(1.0, max(0.0, score)), bool(hard))


def _grows(value: float, least: float, most: float) -> float:
    """0 up to `least`, 1 from `most` on, by the logarithm between."""
    return min(1.0, max(0.0, math.log(max(value, least) / least) / math.log(most / least)))


def mark_hashes() -> dict[int, list[int]]:
    """Hash -> indices of KINDS. Phrases have one or two tokens (two Chinese characters), each found by one hash."""
    found: dict[int, list[int]] = {}
    for at, kind in enumerate(KINDS):
        for phrase in MARKS[kind].split("|"):
            found.setdefault(hashed(phrase)[-1], []).append(at)
    return found
