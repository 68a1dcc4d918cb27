"""Python SDK of midstream: models by name, engines by name, and a control channel that keeps both current.

async with Client("http://127.0.0.1:8790") as client:
    handle = client.model("smollm2-135m")
    print(await handle.generate("Say hello."))
"""

from midstream_sdk.client import Client as Client
from midstream_sdk.engines import Completion as Completion
from midstream_sdk.engines import Engine as Engine
from midstream_sdk.engines import HttpEngine as HttpEngine
from midstream_sdk.handle import ModelHandle as ModelHandle
from midstream_sdk.handle import Warmth as Warmth
