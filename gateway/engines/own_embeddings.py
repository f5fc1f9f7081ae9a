"""Runs the texts of an embeddings, rerank or score request on a token engine, some at a time.

The engine returns the pooled state of each text. Here it is cut to the dimensions asked for,
normalised, and for scores compared by its cosine: as an upstream would answer, in one chunk.
"""

import asyncio
import base64
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from core.errors import BadRequest, Unavailable
from engine.protocol import TokenChunk
from gateway.engines.multi_prompt import MergedGeneration, start_all
from gateway.request.engine import Chunk, EngineClient, Generation, Job, TextChunk
from gateway.request.inference import InferenceRequest

_AT_ONCE = 64  # texts of one request in the engine: a long request must not fill its queue

Vectors = NDArray[np.float32]


async def generate_embeddings(client: EngineClient, job: Job) -> Generation:
    started = await start_all(client, job.parts[:_AT_ONCE])
    return OwnEmbeddings(client, job, started, list(job.parts[_AT_ONCE:]))


class OwnEmbeddings(MergedGeneration):
    """A Generation of one chunk, which has the vectors or scores of all texts."""

    def __init__(
        self, client: EngineClient, job: Job, started: list[Generation], rest: list[Job]
    ) -> None:
        super().__init__(job.engine_request.request_id, started, 1)
        self._client = client
        self._job = job
        self._started = started  # the list that the base class reads
        self._rest = rest
        self._vectors: dict[int, bytes] = {}
        self._answered = False

    async def take(self, needed: int = 1) -> list[Chunk]:
        while not self._answered:
            chunks = await super().take()
            for chunk in chunks:
                if not isinstance(chunk, TokenChunk) or chunk.embedding is None:
                    return [chunk]  # the engine ended it: an error or a deadline
                self._vectors[chunk.choice] = chunk.embedding
            if not chunks and not self._rest:
                return []
            await self._start_more()
            if len(self._vectors) == len(self._job.parts):
                self._answered = True
                return [await asyncio.to_thread(self._answer)]
        return []

    async def _start_more(self) -> None:
        while self._rest and len(self._started) - len(self._vectors) < _AT_ONCE:
            try:
                self._started.append(await self._client.generate(self._rest[0]))
            except Unavailable as error:
                if error.code == "engine_full" and len(self._over) < len(self._started):
                    return  # its queue has room again when one of ours has ended
                raise
            del self._rest[0]

    def _answer(self) -> TextChunk:
        request = self._job.request
        rows = [self._vectors[n] for n in range(len(self._vectors))]
        vectors = np.stack([np.frombuffer(row, "<f4") for row in rows])
        name = self._job.engine_request.request_id
        if "queries" in request.extra:
            scores = similarities(_normalised(vectors), request.extra["queries"])
            return TextChunk(name, 0, "", 0, "stop", scores=scores)
        texts = [
            b'"' + base64.b64encode(row.tobytes()) + b'"' for row in _finished(vectors, request)
        ]
        return TextChunk(name, 0, "", 0, "stop", vectors=texts)


def _finished(vectors: Vectors, request: InferenceRequest) -> Vectors:
    wanted = request.extra["embeddings"].get("dimensions")
    if wanted is not None and wanted > vectors.shape[1]:
        raise BadRequest(
            f"dimensions is {wanted}; the model's embeddings have {vectors.shape[1]}.",
            next_step=f"Set dimensions to at most {vectors.shape[1]}.",
            param="dimensions",
            code="invalid_value",
        )
    cut = vectors[:, :wanted]
    plain = request.extra["own_engine"].get("normalize") is False
    return np.ascontiguousarray(cut) if plain else _normalised(cut)


def _normalised(vectors: Vectors) -> Vectors:
    """Of length 1; a vector of zeros stays one."""
    lengths = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    return (vectors / np.where(lengths == 0, 1, lengths)).astype(np.float32)


def similarities(unit: Vectors, queries: int) -> list[float]:
    """The cosines of the first `queries` vectors with the others."""
    found: Sequence[float] = (unit[:queries].astype(np.float64) * unit[queries:]).sum(1).tolist()
    return list(found)
