"""How hard a prompt is, from 0 to 1: by its length, turns, maths, code, and words that ask for reasoning. Pure.

No model is asked: a few words weigh, in English and Chinese, and some of them (`time complexity`, `prove`) make a
prompt hard however short it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from attrs import define

from gateway.prompt_features import WORDS, Key, key_of

KINDS = ("math", "code", "reasoning", "hard", "simple", "parts")

HARD = KINDS.index("hard")
HARD_FLOOR = 0.8
"""What a hard mark makes a prompt at least."""

WEIGHTS = ((3, 0.13), (4, 0.08), (3, 0.18), (0, 0.0), (2, -0.10), (4, 0.03))
"""Of each kind: so many marks count at most, and so much each."""

_WORTH = tuple(tuple(count * weight for count in range(most + 1)) for most, weight in WEIGHTS)

LEAST, PER_TURN, PER_TOOL = 0.08, 0.02, 0.03
SHORT_TOKENS, LONG_TOKENS, LONG = 64, 8192, 0.45
"""Up to the first length nothing is added, from the second on all of LONG, by the logarithm between."""

_LONG_LOG = math.log(LONG_TOKENS / SHORT_TOKENS)

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

_HARD_PHRASES = MARKS["hard"].split("|")
_HARD = re.compile("|".join(rf"\b{one}\b" if one.isascii() else one for one in _HARD_PHRASES))
_TELLING = frozenset(max(one.split(), key=len).encode() for one in _HARD_PHRASES if one.isascii())
"""The longest word of each, mostly the rarest."""

MOST_HARD = max(map(len, _HARD_PHRASES))
"""Characters of the longest."""

_HARD_CHARACTERS = re.compile("|".join(one for one in _HARD_PHRASES if not one.isascii()))


@define
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
    score = LEAST + (turns - 1 if turns < 7 else 6) * PER_TURN
    if prompt_tokens >= LONG_TOKENS:
        score += LONG
    elif prompt_tokens > SHORT_TOKENS:
        score += LONG * (math.log(prompt_tokens / SHORT_TOKENS) / _LONG_LOG)
    if tools:
        score += min(tools, 5) * PER_TOOL
    for kind, count in enumerate(marks):
        if count:
            worth = _WORTH[kind]
            score += worth[count] if count < len(worth) else worth[-1]
    hard = marks[HARD] > 0
    if hard and score < HARD_FLOOR:
        score = HARD_FLOOR
    return Estimate(0.0 if score < 0.0 else 1.0 if score > 1.0 else score, hard)


def may_say_hard(text: str) -> bool:
    """Whether `text` has a word, or two characters, without which it cannot say what `says_hard` looks for."""
    words = text.encode("ascii", "replace").translate(WORDS).split()
    return not _TELLING.isdisjoint(words) or not (text.isascii() or _HARD_CHARACTERS.search(text) is None)


def says_hard(text: str) -> bool:
    """Whether one of the words that make a prompt hard stands in `text`; for what features leave unread."""
    plain = text.lower().replace("-", " ")
    return any(phrase in plain for phrase in _HARD_PHRASES) and _HARD.search(plain) is not None


def mark_keys() -> dict[Key, list[int]]:
    """Key -> indices of KINDS. A phrase is a word, or two words, signs or Chinese characters: what has a key."""
    found: dict[Key, list[int]] = {}
    for at, kind in enumerate(KINDS):
        for phrase in MARKS[kind].split("|"):
            found.setdefault(key_of(phrase), []).append(at)
    return found
