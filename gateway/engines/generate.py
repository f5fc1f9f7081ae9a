"""Starts a job on an engine: whole, or in its parts."""

from gateway.engines import multi_prompt
from gateway.engines.own_embeddings import generate_embeddings
from gateway.request.engine import EngineClient, Generation, Job


async def generate(client: EngineClient, job: Job) -> Generation:
    """Raises a TollhouseError if the engine refuses the job or a part of it."""
    if not job.parts:
        return await client.generate(job)
    if job.request.inputs is not None:
        if client.speaks_text:  # takes all texts in one request
            return await client.generate(job)
        return await generate_embeddings(client, job)
    return await multi_prompt.generate(client, job)
