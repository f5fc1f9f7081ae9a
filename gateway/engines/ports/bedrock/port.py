"""The port to Amazon Bedrock, with signed requests or a bearer key."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import quote

from core.extras import imports_of, require
from gateway.catalog.upstreams import Upstream
from gateway.engines.ports.bedrock.answer import ConverseReader
from gateway.engines.ports.bedrock.request import converse_body
from gateway.engines.ports.port import Call, Frames, Notes, chat_only
from gateway.request.engine import Job
from gateway.request.inference import InferenceRequest


class BedrockPort:
    name = "bedrock"
    capabilities = frozenset(("tools", "json", "images", "audio", "documents", "reasoning"))
    parameters = frozenset(("top_k", "reasoning_effort"))

    def __init__(self, upstream: Upstream) -> None:
        require("botocore", "aws", "A model on Amazon Bedrock")
        self._url = upstream.url.rstrip("/")
        self._options = upstream.options
        self._key = upstream.api_key
        self._signer: Signer | None = None
        if not self._key:
            self._signer = Signer(self._url, self._options)

    def call(self, job: Job, model: str) -> Call:
        chat_only(job.request, self.name)
        notes = Notes()
        body = converse_body(job, model, self._options, notes)
        way = "converse-stream" if job.request.stream else "converse"
        return Call(f"/model/{quote(model, safe='')}/{way}", body, notes=notes.listed())

    def reader(self, request: InferenceRequest) -> ConverseReader:
        return ConverseReader()

    def frames(self) -> Frames:
        from gateway.engines.ports.bedrock.frames import AwsFrames  # of the extra

        return AwsFrames()

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        if self._signer is None:
            return {"authorization": f"Bearer {self._key}"}
        return await self._signer.headers(path, body)


class Signer:
    """Signs requests (SigV4) with the credentials that botocore finds: of the environment, of a profile,
    or of the machine's role, which it renews."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        with imports_of("aws", "A model on Amazon Bedrock"):
            import botocore.auth
            import botocore.awsrequest
            import botocore.session
        self._url = url
        self._region = str(options["region"])
        self._request = botocore.awsrequest.AWSRequest
        self._auth = botocore.auth.SigV4Auth
        profile = options.get("profile")
        self._session = botocore.session.Session(profile=str(profile) if profile else None)
        self._credentials: Any = None

    async def headers(self, path: str, body: bytes) -> Mapping[str, str]:
        """In a thread only where credentials are to be found or renewed."""
        if self._credentials is None:
            self._credentials = await asyncio.to_thread(self._session.get_credentials)
        if self._credentials is None:
            raise ValueError("botocore finds no credentials of AWS")
        needs = getattr(self._credentials, "refresh_needed", None)
        if needs is not None and needs():
            return await asyncio.to_thread(partial(self._signed, path, body))
        return self._signed(path, body)

    def _signed(self, path: str, body: bytes) -> Mapping[str, str]:
        headers = {"content-type": "application/json"}
        request = self._request("POST", self._url + path, headers=headers, data=body)
        auth = self._auth(self._credentials.get_frozen_credentials(), "bedrock", self._region)
        auth.add_auth(request)
        names = {"authorization", "x-amz-date", "x-amz-security-token", "x-amz-content-sha256"}
        return {name: value for name, value in request.headers.items() if name.lower() in names}
