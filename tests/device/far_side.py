"""The coordinator's half for the virtual Pi: a bundle of a small real model, and a server that runs its tails.

Usage: python -m tests.device.far_side FOLDER; prints its URL when it serves, ends with its standard input.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.tensor_house import CLS, bundle_root, cloud, store_with


def model_file(name: str) -> Path:
    """The largest file of a pulled model."""
    root = Path(os.environ.get("MIDSTREAM_MODELS") or Path.home() / ".cache" / "midstream" / "models")
    return max((f for f in (root / name).iterdir() if f.is_file()), key=lambda f: f.stat().st_size)


async def serve(folder: Path) -> None:
    """Until standard input ends."""
    root = bundle_root([CLS], model_file, folder / "bundles")
    async with cloud(root, store_with(folder / "store", {CLS: model_file(CLS)})) as far:
        print(f"http://127.0.0.1:{far.server.port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
