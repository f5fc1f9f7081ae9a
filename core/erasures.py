"""The erasure of an end user from what the API stores: texts, answers of repetitions, and batches.

The name in usage is billing's to erase. Not found here, because nothing says whose it is: files that
are no batch's, prompts, and items that a client put into a conversation itself, unless nobody else is
named in it.
"""

from sqlalchemy.orm import Session

from core import idempotency
from core.batches.erasing import erase_lines
from core.clock import Clock
from core.responses.end_users import key_of
from core.responses.erasing import erase_texts
from core.sealing import Sealer
from core.tenants import audit
from core.tenants.scope import TenantScope


def erase_end_user(
    session: Session, scope: TenantScope, clock: Clock, sealer: Sealer, end_user: str
) -> dict[str, int]:
    """Rows deleted by kind, and `unreadable`: rows stored under another operator token, which can
    be searched only once it is restored. The audit log gets the counts, not the name."""
    tenant_id = scope.tenant_id
    texts, lines = (
        erase_texts(session, sealer, tenant_id, end_user),
        erase_lines(session, tenant_id, end_user),
    )
    key, generation = key_of(sealer, tenant_id, end_user), sealer.generation(tenant_id)
    erased = {
        "responses": texts.responses,
        "completions": texts.completions,
        "conversations": texts.conversations,
        "conversation_items": texts.conversation_items,
        "idempotent_answers": idempotency.erase(session, tenant_id, key, generation),
        "batch_lines": lines.batch_lines,
        "file_lines": lines.file_lines,
        "unreadable": texts.unreadable,
    }
    audit.record(
        session, scope, clock, "end_user.erase_texts", tenant_id, before=None, after=erased
    )
    return erased
