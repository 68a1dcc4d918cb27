"""`midstream route calibrate`: from labelled answers to the curves that confidence is read off."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from agent.cli.ask import agent_link, agent_url, error_of, not_running
from agent.cli.progress import ProgressBar
from agent.config import load
from engines.catalogue import load_catalogue
from engines.store import ModelStore
from gateway.calibration import LEAST_PAIRS, Calibration, Scope, auroc, fit, threshold_for, weights_of
from gateway.calibrations import keep_calibrations
from gateway.confidence import FEATURES, Features, features
from links.port import Link
from protocol.errors import BadRequest, ConfigError, LinkError
from protocol.text import Token

MAX_ROWS = 100_000
MAX_LINE_BYTES = 1 << 20
DEADLINE_S = 120.0


@frozen
class Labelled:
    """One answer with what it is worth."""

    found: Features
    right: bool
    intent: str


def route(argv: list[str]) -> int:
    """`midstream route calibrate FILE`."""
    parser = argparse.ArgumentParser(prog="midstream route", description="how answers of the device are judged")
    verbs = parser.add_subparsers(dest="verb", required=True)
    calibrate = verbs.add_parser(
        "calibrate",
        help="fit confidence curves to labelled answers",
        description="FILE has one JSON object a line: {logprobs, right} of an answer, or {prompt, expect} to ask the "
        "running agent's device; both may carry margins and intent",
    )
    calibrate.add_argument("file", type=Path)
    calibrate.add_argument("--model", required=True, help="text model that the answers are of")
    calibrate.add_argument("--share", type=float, default=0.3, help="share of answers to hand over (default 0.3)")
    calibrate.add_argument("--max-tokens", type=int, default=64, help="of answers that are asked for")
    calibrate.add_argument("--url", help="the running agent (default: as configured)")
    calibrate.add_argument("--json", action="store_true")
    return asyncio.run(_calibrate(parser.parse_args(argv)))


async def _calibrate(options: argparse.Namespace) -> int:
    config = load()
    store = ModelStore(config.models_dir, load_catalogue(config.models_dir / "catalogue.toml"))
    weights = weights_of(store.entry(options.model))
    labelled = await _labelled(list(rows_of(options.file)), options)
    curves = curves_for(options.model, weights, labelled)
    keep_calibrations(config.state_dir, curves)
    for curve in curves:
        scores = [one.found.value(curve.feature) for one in labelled if curve.scope.intent in ("", one.intent)]
        cut = threshold_for(curve, scores, options.share)
        told = {
            "intent": curve.scope.intent or "all", "feature": curve.feature, "pairs": curve.pairs,
            "auroc": round(curve.auroc, 3), "ece": round(curve.ece, 3), "raw_ece": round(curve.raw_ece, 3),
            "confidence_threshold": round(cut, 3), "share": options.share,
        }  # fmt: skip
        print(json.dumps(told) if options.json else line_of(told))
    return 0


def line_of(told: Mapping[str, Any]) -> str:
    """One curve for a person."""
    return (
        f"{told['intent']:16} {told['pairs']:5} answers, by {told['feature']}: AUROC {told['auroc']}, "
        f"calibration error {told['ece']} (raw {told['raw_ece']}); "
        f"routing.fallback.confidence_threshold = {told['confidence_threshold']} hands over {100 * told['share']:.0f} %"
    )


def rows_of(file: Path) -> Iterator[Mapping[str, Any]]:
    """The objects of a JSON-lines file. Raises ConfigError naming file and line."""
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(iter(lambda: stream.readline(MAX_LINE_BYTES + 1), b""), start=1):
                if number > MAX_ROWS:
                    raise ConfigError(f"{file} has more than {MAX_ROWS} lines", next_step="take a sample of them")
                if line.strip():
                    yield _row(line, f"{file}:{number}")
    except OSError as err:
        raise ConfigError(f"cannot read {file}: {err.strerror}", next_step="name a JSON-lines file") from err


def _row(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    given = isinstance(row, dict) and ({"logprobs", "right"} <= row.keys() or {"prompt", "expect"} <= row.keys())
    if not given:
        raise ConfigError(
            f"{where} is no labelled answer",
            next_step='write {"logprobs": [...], "right": true} or {"prompt": "...", "expect": "..."}',
        )
    return dict(row)


async def _labelled(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[Labelled]:
    asked = [row for row in rows if "prompt" in row]
    found = [_given(row) for row in rows if "prompt" not in row]
    if asked:
        found += await _ask_all(asked, options)
    return [one for one in found if one is not None]


def _given(row: Mapping[str, Any]) -> Labelled | None:
    logprobs, margins = list(row["logprobs"]), row.get("margins")
    tokens = [
        Token(place, None, b"x", _number(logprob), _number(margins[place]) if margins else None)
        for place, logprob in enumerate(logprobs)
    ]
    read = features(tokens)
    return Labelled(read, bool(row["right"]), str(row.get("intent", ""))) if read is not None else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


async def _ask_all(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> list[Labelled | None]:
    url = agent_url(options.url)
    link = agent_link(url)
    found = []
    try:
        with ProgressBar("asking", unit="answers") as progress:
            for number, row in enumerate(rows):
                progress.update(number, len(rows))
                found.append(await _ask(link, row, options))
    except LinkError as err:
        raise not_running(url, err) from err
    finally:
        await link.close()
    return found


async def _ask(link: Link, row: Mapping[str, Any], options: argparse.Namespace) -> Labelled | None:
    """None for an answer that another side helped to make: its logits are not this model's."""
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": str(row["prompt"])}],
        "max_tokens": options.max_tokens,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    headers = {"content-type": "application/json"}
    reply = await link.exchange("/v1/chat/completions", headers, json.dumps(body).encode(), DEADLINE_S)
    if reply.status != 200:
        raise error_of(reply)
    document = json.loads(reply.body)
    choice = document["choices"][0]
    if {side["side"] for side in document["midstream"]["sides"]} != {"device"} or not choice.get("logprobs"):
        return None
    read = features([_token(place, piece) for place, piece in enumerate(choice["logprobs"]["content"])])
    right = str(row["expect"]).lower() in str(choice["message"]["content"]).lower()
    return Labelled(read, right, str(row.get("intent", ""))) if read is not None else None


def _token(place: int, piece: Mapping[str, Any]) -> Token:
    top = sorted((float(one["logprob"]) for one in piece.get("top_logprobs", ())), reverse=True)
    margin = top[0] - top[1] if len(top) > 1 else None
    return Token(place, None, str(piece["token"]).encode() or b"x", float(piece["logprob"]), margin)


def curves_for(model: str, weights: str, labelled: Sequence[Labelled]) -> list[Calibration]:
    """A curve over all answers, and one for each intent that has enough of them. Raises BadRequest for too few."""
    if len(labelled) < LEAST_PAIRS:
        raise BadRequest(
            f"{len(labelled)} labelled answers with logprobs, at least {LEAST_PAIRS} are needed",
            next_step="label more answers; an engine without logprobs cannot be calibrated",
            field="file",
        )
    intents = sorted({one.intent for one in labelled if one.intent})
    groups = [
        ("", list(labelled)),
        *((intent, [one for one in labelled if one.intent == intent]) for intent in intents),
    ]
    return [_curve(Scope(model, weights, intent), group) for intent, group in groups if len(group) >= LEAST_PAIRS]


def _curve(scope: Scope, group: Sequence[Labelled]) -> Calibration:
    """By the feature that tells right from wrong best."""
    right = [one.right for one in group]
    feature = max(FEATURES, key=lambda name: auroc([one.found.value(name) for one in group], right))
    return fit(scope, feature, [one.found.value(feature) for one in group], right)
