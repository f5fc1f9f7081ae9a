"""/admin/v1/prompts: prompt templates and their versions, for `prompt` of chats and responses."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends

from core.tenants import prompt_templates
from gateway.admin.access import AdminContext, RequirePermission
from gateway.admin.schemas import NewPrompt, NewPromptVersion, PromptChange

router = APIRouter(prefix="/admin/v1/prompts", tags=["prompts"])
# The permission to manage adapters covers prompts.
ReadAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "read"))]
WriteAccess = Annotated[AdminContext, Depends(RequirePermission("adapters", "write"))]


@router.get("")
def list_prompts(ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        rows = prompt_templates.all_of(session, ctx.scope)
        return {"object": "list", "data": [prompt_templates.describe(each) for each in rows]}


@router.post("", status_code=201)
def create_prompt(body: NewPrompt, ctx: WriteAccess) -> dict[str, Any]:
    """Create a prompt with its first version. Placeholders are written like `{{customer}}`."""
    with ctx.database.transaction() as session:
        messages = [each.model_dump() for each in body.messages]
        row = prompt_templates.create(
            session, ctx.scope, ctx.clock, name=body.name, messages=messages
        )
        return prompt_templates.describe(row)


@router.get("/{prompt_id}")
def get_prompt(prompt_id: str, ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        return prompt_templates.describe(prompt_templates.get(session, ctx.scope, prompt_id))


@router.patch("/{prompt_id}")
def change_prompt(prompt_id: str, body: PromptChange, ctx: WriteAccess) -> dict[str, Any]:
    """Choose the version that requests without one use."""
    with ctx.database.transaction() as session:
        row = prompt_templates.change(
            session, ctx.scope, ctx.clock, prompt_id, current_version=body.current_version
        )
        return prompt_templates.describe(row)


@router.delete("/{prompt_id}")
def remove_prompt(prompt_id: str, ctx: WriteAccess) -> dict[str, Any]:
    """Delete the prompt and its versions; requests that name it are refused from now on."""
    with ctx.database.transaction() as session:
        row = prompt_templates.remove(session, ctx.scope, ctx.clock, prompt_id)
        return {"id": row.id, "object": "prompt.deleted", "deleted": True}


@router.get("/{prompt_id}/versions")
def list_versions(prompt_id: str, ctx: ReadAccess) -> dict[str, Any]:
    with ctx.database.read() as session:
        row = prompt_templates.get(session, ctx.scope, prompt_id)
        rows = prompt_templates.versions(session, row)
        data = [prompt_templates.describe_version(each) for each in rows]
        return {"object": "list", "data": data}


@router.post("/{prompt_id}/versions", status_code=201)
def add_version(prompt_id: str, body: NewPromptVersion, ctx: WriteAccess) -> dict[str, Any]:
    with ctx.database.transaction() as session:
        messages = [each.model_dump() for each in body.messages]
        made = prompt_templates.add_version(
            session, ctx.scope, ctx.clock, prompt_id, messages, current=body.current
        )
        return prompt_templates.describe_version(made)
