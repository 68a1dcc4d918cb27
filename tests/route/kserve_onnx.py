"""A stranger's server for the exported repository: KServe's Python server over onnxruntime, in its own environment.

Usage: python kserve_onnx.py REPOSITORY HTTP_PORT
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnxruntime
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer


class OnnxModel(Model):  # type: ignore[misc]
    def __init__(self, folder: Path) -> None:
        super().__init__(folder.name)
        self.session = onnxruntime.InferenceSession(
            str(folder / "1" / "model.onnx"), providers=["CPUExecutionProvider"]
        )
        self.ready = True

    async def predict(self, payload: InferRequest, headers: Any = None, response_headers: Any = None) -> InferResponse:
        fed = {given.name: given.as_numpy() for given in payload.inputs}
        kinds = {"tensor(float)": "FP32", "tensor(uint8)": "UINT8", "tensor(float16)": "FP16"}
        outputs = []
        for spec, array in zip(self.session.get_outputs(), self.session.run(None, fed), strict=True):
            output = InferOutput(spec.name, list(array.shape), kinds[spec.type])
            output.set_data_from_numpy(array, binary_data=True)
            outputs.append(output)
        return InferResponse(payload.id, self.name, outputs)


if __name__ == "__main__":
    folders = [path for path in sorted(Path(sys.argv[1]).iterdir()) if (path / "config.pbtxt").is_file()]
    server = ModelServer(http_port=int(sys.argv[2]), enable_grpc=False, workers=1)
    server.start([OnnxModel(folder) for folder in folders])
