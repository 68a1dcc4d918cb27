"""Whether two questions that lie close together really ask the same: numbers, negation, names, opposites; pure.

Sentence embeddings put "in Paris" beside "in London" and "is" beside "is not": a cosine of 0.97 says "same topic", not
"same answer". What stands here is compared word by word after the vectors agreed, and the first difference is a miss.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from difflib import SequenceMatcher

from attrs import frozen

MAX_COMPARED_WORDS = 512
"""Longer questions are compared by sets only: an alignment of them would cost more than the answer's tokens."""

SMALL_EDIT_WORDS = 2
"""A substitution of so few words in otherwise equal texts is an edit, not a paraphrase."""

SAME_ORDER_RATIO = 0.7
"""Share of words in common, in order, from which on two texts count as one text that was edited."""

MAX_EDITS = 1
"""A paraphrase changes a text in many places, an edit in one."""

_WORD = re.compile(r"\d+(?:[.,:]\d+)*%?|[a-z]+(?:[-'][a-z]+)*|[\u3400-\u9fff]|[^\W\d_]+", re.IGNORECASE)
_CJK = re.compile(r"[\u3400-\u9fff]")


def _list(words: str) -> tuple[str, ...]:
    return tuple(words.split())


_NUMBER_WORDS = {
    word: str(value)
    for value, word in enumerate(
        _list(
            "zero - two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
            "seventeen eighteen nineteen twenty"
        )
    )
} | {"thirty": "30", "forty": "40", "fifty": "50", "hundred": "100", "million": "1000000", "half": "0.5"}
"""Without "one", which is a pronoun more often than a number."""

_CJK_DIGITS = dict(zip("零一二三四五六七八九十两", [*(str(n) for n in range(11)), "2"], strict=True))

_NEGATIONS = frozenset(
    _list(
        "not no never none nobody nothing neither nor without cannot n't isn't aren't wasn't weren't don't doesn't "
        "didn't won't wouldn't can't couldn't shouldn't haven't hasn't hadn't unable impossible "
        "不 没 無 无 非 未 别 勿"
    )
)
_FILLERS = frozenset(
    _list(
        "a an the this that these those some any my your our please just really very also so well ok hello hi hey "
        "is are was were be been do does did can could will would shall should may might must i we you it there here "
        "what which how and or to of for me us 的 了 吗 呢 吧 啊 请 请问 么"
    )
)
"""Words whose exchange leaves a question what it was."""

_DIRECTED = frozenset(_list("to from than into over under before after by 比 到 从 给 向"))

_OPPOSITES = (
    "increase decrease|raise lower|max min|maximum minimum|most least|more less|before after|open close|buy sell|"
    "enable disable|start stop|begin end|import export|first last|left right|up down|on off|with without|push pull|"
    "encode decode|encrypt decrypt|upload download|install uninstall|add remove|create delete|true false|hot cold|"
    "high low|fast slow|big small|large small|long short|old new|early late|win lose|give take|lend borrow|"
    "inside outside|above below|north south|east west|northern southern|eastern western|morning evening|"
    "today tomorrow|today yesterday|tomorrow yesterday|now then|always never|best worst|good bad|safe dangerous|"
    "cheap expensive|cheapest expensive|same different|accept reject|allow deny|include exclude|input output|"
    "男 女|大 小|多 少|高 低|快 慢|早 晚|开 关|买 卖|前 后|左 右|上 下|进 出|新 旧|长 短|好 坏|加 减|最 不"
)
_PAIRS = frozenset(frozenset(pair.split()) for pair in _OPPOSITES.split("|"))
_SETS = tuple(
    frozenset(words.split())
    for words in (
        "monday tuesday wednesday thursday friday saturday sunday weekend today tomorrow yesterday tonight",
        "january february march april may june july august september october november december",
        "spring summer autumn fall winter",
        "morning noon afternoon evening night midnight",
        "second seconds minute minutes hour hours day days week weeks month months year years decade century",
        "red orange yellow green blue purple violet black white grey gray brown pink",
        "celsius fahrenheit kelvin metre metres meter meters kilometre kilometres km mile miles foot feet inch inches "
        "gram grams kilogram kilograms kg pound pounds ounce ounces litre litres liter liters gallon gallons",
        "euro euros dollar dollars yuan yen pound rupee franc",
        "he him his she her hers",
    )
)
_ASKS = {
    "who": "who", "whom": "who", "whose": "who", "when": "when", "where": "where", "why": "why", "how": "how",
    "谁": "who", "何": "what", "几": "how many", "哪": "which",
}  # fmt: skip


@frozen
class Fingerprint:
    """What must agree between two questions before one's answer serves the other.

    words: all words in order, lower case. numbers: sorted. negations: their count, odd or even decides.
    names: words written like names or codes. closed: words out of closed sets such as days and units.
    asks: who, when, where, why, how (many), or empty.
    """

    words: tuple[str, ...]
    numbers: tuple[str, ...]
    negations: int
    names: frozenset[str]
    closed: frozenset[str]
    asks: str


def fingerprint(text: str) -> Fingerprint:
    """Read a question once; comparing two fingerprints costs microseconds."""
    written = [match.group() for match in _WORD.finditer(unicodedata.normalize("NFKC", text).replace("\u2019", "'"))]
    words = tuple(word.lower() for word in written)
    return Fingerprint(
        words=words,
        numbers=tuple(sorted(set(filter(None, map(_number, words))))),
        negations=_negations(words),
        names=_names(text, written),
        closed=frozenset(word for word in words if any(word in closed for closed in _SETS)),
        asks=_asks(words),
    )


def difference(one: Fingerprint, other: Fingerprint) -> str:
    """What tells two questions apart; empty when nothing here does."""
    if one.numbers != other.numbers:
        return "numbers"
    if one.negations % 2 != other.negations % 2:
        return "negation"
    if one.asks and other.asks and one.asks != other.asks:
        return "question"
    mine, theirs = _stems(one.words), _stems(other.words)
    if _missing(one.names, theirs) or _missing(other.names, mine):
        return "names"
    if one.closed != other.closed:
        return "closed set"
    if _opposed(set(one.words), set(other.words)):
        return "opposites"
    if _turned(one.words, other.words):
        return "order"
    return "edit" if _edited(one.words, other.words) else ""


def _number(word: str) -> str:
    if word[0].isdigit():
        return word.replace(",", "").rstrip(".:")
    return _NUMBER_WORDS.get(word, _CJK_DIGITS.get(word, ""))


def _negations(words: tuple[str, ...]) -> int:
    """Their count; a "no" that opens an answer repeats what its sentence says."""
    body = words[1:] if words[:1] == ("no",) else words
    return sum(word in _NEGATIONS or word.endswith("n't") for word in body)


def _names(text: str, written: list[str]) -> frozenset[str]:
    """Capitalised words that do not open a sentence, words with capitals inside, and words with digits beside."""
    opening = {match.group(1) for match in re.finditer(r"(?:^|[.!?:]\s+)[\"'(]*([^\W\d_]+)", text)}
    found = set()
    for word in written:
        inside = any(letter.isupper() for letter in word[1:])
        if inside or (word[0].isupper() and len(word) > 1 and word not in opening):
            found.add(word.lower())
    return frozenset(found)


def _asks(words: tuple[str, ...]) -> str:
    for place, word in enumerate(words):
        kind = _ASKS.get(word, "")
        if kind == "how" and place + 1 < len(words) and words[place + 1] in ("many", "much", "long", "far", "old"):
            return f"how {words[place + 1]}"
        if kind:
            return kind
    return ""


def _stem(word: str) -> str:
    """Enough that plural, possessive and simple verb forms meet; "models" and "model", "hosting" and "hosted"."""
    for ending in ("'s", "ing", "ed", "es", "s"):
        if word.endswith(ending) and len(word) - len(ending) >= 3:
            return word[: -len(ending)]
    return word


def _stems(words: Iterable[str]) -> frozenset[str]:
    found = set()
    for word in words:
        found.add(_stem(word))
        found.update(_stem(part) for part in word.split("-"))
    return frozenset(found)


def _missing(names: frozenset[str], stems: frozenset[str]) -> bool:
    return any(_stem(name) not in stems and not all(_stem(part) in stems for part in name.split("-")) for name in names)


def _opposed(one: set[str], other: set[str]) -> bool:
    """A word on one side whose opposite stands on the other side only."""
    left, right = one - other, other - one
    return any(frozenset((mine, theirs)) in _PAIRS for mine in left for theirs in right) if left and right else False


def _turned(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """The same words in another order around a word that has a direction: "dollars to euros", "faster than"."""
    return one != other and sorted(one) == sorted(other) and not _DIRECTED.isdisjoint(one)


def _edited(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """One text is the other with few words exchanged in one place: a name, a verb or an amount, not a new wording."""
    if max(len(one), len(other)) > MAX_COMPARED_WORDS or not one or not other:
        return False
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    if matcher.quick_ratio() < SAME_ORDER_RATIO or matcher.ratio() < SAME_ORDER_RATIO:
        return False
    changed = [op for op in matcher.get_opcodes() if op[0] != "equal"]
    return len(changed) <= MAX_EDITS and any(
        _exchanged(one[a:b], other[c:d]) for op, a, b, c, d in changed if op == "replace"
    )


def _exchanged(mine: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    """Chinese and Japanese words are one to four characters, each of them a word here."""
    longest = 2 * SMALL_EDIT_WORDS if _CJK.match(mine[0]) and _CJK.match(theirs[0]) else SMALL_EDIT_WORDS
    if len(mine) > longest or len(theirs) > longest:
        return False
    left, right = _stems(mine) - _FILLERS, _stems(theirs) - _FILLERS
    return bool(left) and bool(right) and not left & right
