"""The erasure of an end user from what the API stores: texts, answers of repetitions, and batches.

The name in usage is billing's to erase. Not found here, because nothing says whose it is: files that
are no batch's, prompts, and items that a client put into a conversation itself, unless nobody else is
named in it.
"""

from core import idempotency
from core.batches import erasing
from core.clock import Clock
from core.database import Database
from core.responses.end_users import key_of
from core.responses.erasing import erase_texts
from core.sealing import Sealer
from core.tenants import audit
from core.tenants.scope import TenantScope


def erase_end_user(
    database: Database, scope: TenantScope, clock: Clock, sealer: Sealer, end_user: str
) -> dict[str, int]:
    """Rows deleted by kind, and `unreadable`: rows stored under another operator token, which can
    be searched only once it is restored. The audit log gets the counts, not the name.

    It takes several transactions, each of bounded size. After an interruption, call it again."""
    tenant_id = scope.tenant_id
    with database.transaction() as session:
        texts = erase_texts(session, sealer, tenant_id, end_user)
        key, generation = key_of(sealer, tenant_id, end_user), sealer.generation(tenant_id)
        answers = idempotency.erase(session, tenant_id, key, generation)
    batch_lines, file_lines = _erase_lines(database, tenant_id, end_user)
    erased = {
        "responses": texts.responses,
        "completions": texts.completions,
        "conversations": texts.conversations,
        "conversation_items": texts.conversation_items,
        "idempotent_answers": answers,
        "batch_lines": batch_lines,
        "file_lines": file_lines,
        "unreadable": texts.unreadable,
    }
    with database.transaction() as session:
        audit.record(
            session, scope, clock, "end_user.erase_texts", tenant_id, before=None, after=erased
        )
    return erased


def _erase_lines(database: Database, tenant_id: str, end_user: str) -> tuple[int, int]:
    """(lines of batches that run, lines of files)."""
    with database.read() as session:
        named = erasing.find(session, tenant_id, end_user)
    running = in_files = 0
    for batch_id, lines in named.running.items():
        with database.transaction() as session:
            running += erasing.erase_running(session, batch_id, lines)
    for file_id, names in named.files.items():
        with database.transaction() as session:
            in_files += erasing.erase_in_files(session, tenant_id, file_id, names)
    return running, in_files
