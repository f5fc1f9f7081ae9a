"""Bank statements of a simulation: what customers wired, and what must be booked for it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.billing.simulation.rows import Books, rows_of

State = tuple[int, int]  # how often it was booked, and how often a booking was taken back
NOT_STORED: State = (-1, 0)


@dataclass
class Transfer:
    """A line at the bank. `states` are those that it may have: more than one once an answer was lost."""

    bank_id: str
    minor: int
    currency: str
    written: str  # by the payer
    day: str
    tenant: str = ""  # whose account or invoice it names, in the currency of the account
    states: set[State] = field(default_factory=lambda: {NOT_STORED})

    def imported(self, *, surely: bool) -> None:
        self._become({NOT_STORED: (1 if self.tenant else 0, 0)}, surely=surely)

    def assigned(self, tenant: str, *, surely: bool) -> None:
        self.tenant = tenant
        self._become({(n, n): (n + 1, n) for n in range(20)}, surely=surely)

    def taken_back(self, *, surely: bool) -> None:
        self._become({(n + 1, n): (n + 1, n + 1) for n in range(20)}, surely=surely)

    def _become(self, moves: dict[State, State], *, surely: bool) -> None:
        after = {moves.get(state, state) for state in self.states}
        self.states = after if surely else self.states | after


def of_transfers(books: Books, transfers: list[Transfer]) -> Iterator[str]:
    """Each line is stored once; its bookings are its amount, in cash, and so is what is taken back."""
    for transfer in transfers:
        lines = rows_of(books, "select * from bank_lines where bank_id = ?", transfer.bank_id)
        found = _state(books, lines, transfer) if lines else NOT_STORED
        if len(lines) > 1 or found not in transfer.states:
            yield f"{transfer} is {found} in {len(lines)} lines, not one of {transfer.states}"
        if lines and (lines[0]["amount_minor"], lines[0]["currency"]) != (
            transfer.minor,
            transfer.currency,
        ):
            yield f"{transfer} is stored as {lines[0]}"


def _state(books: Books, lines: list[dict[str, object]], transfer: Transfer) -> tuple[object, ...]:
    """A whole number of times its amount, else the sums themselves, which are no state."""
    stem = f"bank:{lines[0]['id']}:%"
    paid = rows_of(books, "select * from payments where reference like ?", stem)
    back = rows_of(books, "select * from refunds where reference like ?", stem)
    wrong = [each for each in paid if each["tenant_id"] != transfer.tenant]
    cash = sum(_cash(books, each["id"]) for each in paid)
    sums = sum(each["amount_minor"] for each in paid), sum(each["amount_minor"] for each in back)
    if wrong or cash != sums[0] * 10**10:
        return "payments", sums, "cash", cash, "of others", wrong
    if any(each % transfer.minor for each in sums):
        return sums
    return sums[0] // transfer.minor, sums[1] // transfer.minor


def _cash(books: Books, payment_id: str) -> int:
    (units,) = books.execute(
        "select coalesce(sum(e.units), 0) from ledger_entries e join ledger_transactions t"
        " on t.id = e.transaction_id join ledger_accounts a on a.id = e.account_id"
        " where a.kind = 'cash' and t.reference in (?, ?)",
        (f"payment:{payment_id}", f"grant:payment:{payment_id}"),
    ).fetchone()
    return int(units)
