"""Starts a job on an engine: whole, or in its parts."""

from gateway.upstreams import multi_prompt
from gateway.upstreams.base import EngineClient, Generation, Job
from gateway.upstreams.own_embeddings import generate_embeddings


async def generate(client: EngineClient, job: Job) -> Generation:
    """Raises a TollhouseError if the engine refuses the job or a part of it."""
    if not job.parts:
        return await client.generate(job)
    if job.request.inputs is not None:
        if client.speaks_text:  # takes all texts in one request
            return await client.generate(job)
        return await generate_embeddings(client, job)
    return await multi_prompt.generate(client, job)
