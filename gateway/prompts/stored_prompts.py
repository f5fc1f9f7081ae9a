"""Fills the prompt template that a request names; what was read is kept until a tenant changes."""

import asyncio

from msgspec.structs import replace
from sqlalchemy.exc import SQLAlchemyError

from core.database import Database
from core.errors import BadRequest, DependencyDown
from core.tenants import prompt_templates
from core.tenants.key_cache import KeyCache
from core.tenants.keys import Principal
from core.tenants.prompt_templates import Messages, variables_of
from gateway.request.inference import InferenceRequest
from gateway.request.prompt_references import PromptReference

_MOST_READ = 1_000
_Key = tuple[str, str, int | None]  # tenant, prompt, version


class StoredPrompts:
    def __init__(self, database: Database, keys: KeyCache) -> None:
        self._database = database
        self._keys = keys
        self._read_at = -1  # epoch of the tenants' changes
        self._known: dict[_Key, Messages] = {}

    async def fill(self, principal: Principal, request: InferenceRequest) -> InferenceRequest:
        """The request with the messages of the template that it names. Raises NotFound or BadRequest,
        by field."""
        named = request.prompt
        assert named is not None
        messages = await self._messages(principal, named)
        wanted = variables_of(messages)
        for name in wanted:
            if name not in named.variables:
                raise _variable(name, "is missing", f"It has the variables {', '.join(wanted)}.")
        for name in named.variables:
            if name not in wanted:
                listed = ", ".join(wanted) or "no variables"
                raise _variable(name[:80], "is not in the prompt", f"It has {listed}.")
        filled = prompt_templates.fill(messages, named.variables)
        own = request.messages or []
        return replace(request, messages=[*own[: named.before], *filled, *own[named.before :]])

    async def _messages(self, principal: Principal, named: PromptReference) -> Messages:
        epoch = self._keys.epoch
        if epoch != self._read_at or len(self._known) >= _MOST_READ:
            self._known, self._read_at = {}, epoch
        key = (principal.tenant_id, named.id, named.version)
        messages = self._known.get(key)
        if messages is None:
            known = self._known  # of this epoch: a change that is polled meanwhile starts another
            try:
                messages = await asyncio.to_thread(self._read, principal, named)
            except SQLAlchemyError:
                raise DependencyDown(
                    "The prompt cannot be read: the database does not answer.",
                    next_step="Try again shortly, or send the messages themselves.",
                    retry_after_s=2.0,
                ) from None
            known[key] = messages
        return messages

    def _read(self, principal: Principal, named: PromptReference) -> Messages:
        with self._database.read() as session:
            row = prompt_templates.get(session, principal.scope, named.id)
            number = named.version or row.current_version
            return prompt_templates.version(session, row, number).messages


def _variable(name: str, problem: str, next_step: str) -> BadRequest:
    return BadRequest(
        f"The variable {name!r} {problem}.",
        next_step=next_step,
        param=f"prompt.variables.{name}",
        code="invalid_value",
    )
