"""Wires of customers, the statements on which the seller's bank lists them, and a clerk who imports
these, again and in any format, and assigns what names no invoice.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from sqlalchemy import select
from sqlalchemy.orm import Session

from benchmarks.simulation.faults import Faults
from billing.accounts import references
from billing.adjustments.money_acts import FourEyes
from billing.bank import wires
from billing.bank.tables import BankLine
from billing.invoicing.tables import Invoice
from core.clock import FakeClock
from core.database import Database
from core.errors import TollhouseError
from core.money import format_minor
from tests.billing.simulation.statements import Transfer

IBAN = "DE89370400440532013000"
_CAMT = """<?xml version="1.0" encoding="UTF-8"?>
<Document xmlns="urn:iso:std:iso:20022:tech:xsd:camt.053.001.08"><BkToCstmrStmt><Stmt><Id>S</Id>
<Acct><Id><IBAN>{iban}</IBAN></Id></Acct>{entries}</Stmt></BkToCstmrStmt></Document>"""
_ENTRY = """<Ntry><Amt Ccy="{currency}">{amount}</Amt><CdtDbtInd>{sign}</CdtDbtInd><Sts><Cd>BOOK</Cd>
</Sts><BookgDt><Dt>{day}</Dt></BookgDt><AcctSvcrRef>{name}</AcctSvcrRef><NtryDtls><TxDtls><RmtInf>
<Ustrd>{text}</Ustrd></RmtInf></TxDtls></NtryDtls></Ntry>"""


@dataclass
class Statements:
    database: Database
    clock: FakeClock
    faults: Faults
    tenants: tuple[str, ...]
    transfers: list[Transfer] = field(default_factory=list)

    def act(self) -> None:
        self.faults.chance.choice(
            [self._wire, self._wire, self._bring, self._bring, self._assign, self._take_back]
        )()

    def _wire(self) -> None:
        """A customer names an invoice, their account, or nothing that one could know."""
        chance = self.faults.chance
        tenant = chance.choice(self.tenants)
        with self.database.read() as session:
            query = select(Invoice).where(Invoice.number.is_not(None)).order_by(Invoice.number)
            invoice = chance.choice([None, *session.scalars(query)])
        reference = references.of_customer(tenant)
        if invoice is not None:
            tenant, label = invoice.tenant_id, str(invoice.label)
            reference = chance.choice([references.of_invoice(label), label])
        printed = references.printed(reference) if reference.startswith("RF") else reference
        written = chance.choice([reference, printed, "", "thank you"])
        known = written in (reference, printed)
        currency = chance.choice(["USD"] * 5 + ["EUR"])
        minor = chance.choice([1, -1, 1, 1]) * chance.randint(1, 3000)
        is_booked = known and minor > 0 and currency == "USD"
        self.transfers.append(
            Transfer(
                f"line-{len(self.transfers)}",
                minor,
                currency,
                written,
                f"{self.clock.now():%Y-%m-%d}",
                tenant if is_booked else "",
            )
        )

    def _bring(self) -> None:
        """A statement of some lines; many of them were on an earlier one."""
        chance = self.faults.chance
        if not self.transfers:
            return
        some = chance.sample(self.transfers, min(len(self.transfers), chance.randint(1, 6)))
        lines = wires.parse(chance.choice([_as_camt, _as_csv])(some).encode())

        def _import(session: Session) -> None:
            wires.import_lines(session, lines, self._clerk())

        with self._told(*[each.imported for each in some]):
            self._transact(_import)

    def _assign(self) -> None:
        chance = self.faults.chance
        if not self.transfers:
            return
        transfer = chance.choice(self.transfers)
        tenant = transfer.tenant or chance.choice(self.tenants)
        line_id = self._line_id(transfer)
        if line_id is None:
            return

        def _told(*, surely: bool) -> None:
            transfer.assigned(tenant, surely=surely)

        with self._told(_told):
            self._transact(lambda session: wires.assign(session, line_id, tenant, self._clerk()))

    def _take_back(self) -> None:
        if not self.transfers:
            return
        transfer = self.faults.chance.choice(self.transfers)
        line_id = self._line_id(transfer)
        if line_id is None:
            return

        def _undo(session: Session) -> None:
            wires.unassign(session, line_id, self._clerk(), "of another customer")

        with self._told(transfer.taken_back):
            self._transact(_undo)

    def _line_id(self, transfer: Transfer) -> str | None:
        with self.database.read() as session:
            query = select(BankLine.id).where(BankLine.bank_id == transfer.bank_id)
            return session.scalar(query)

    def _transact(self, work: Callable[[Session], object]) -> None:
        with self.database.transaction() as session:
            work(session)

    @contextmanager
    def _told(self, *moves: Callable[..., None]) -> Iterator[None]:
        """An act that raised a fault may have happened; one that was refused did not."""
        try:
            yield
        except TollhouseError:
            raise
        except BaseException:
            for move in moves:
                move(surely=False)
            raise
        for move in moves:
            move(surely=True)

    def _clerk(self) -> wires.Clerk:
        return wires.Clerk(self.clock, "clerk", FourEyes())


def _as_camt(transfers: list[Transfer]) -> str:
    entries = [
        _ENTRY.format(
            currency=each.currency,
            amount=format_minor(abs(each.minor), each.currency),
            sign="CRDT" if each.minor > 0 else "DBIT",
            day=each.day,
            name=each.bank_id,
            text=each.written,
        )
        for each in transfers
    ]
    return _CAMT.format(iban=IBAN, entries="\n".join(entries))


def _as_csv(transfers: list[Transfer]) -> str:
    rows = [
        f"{each.bank_id},{each.day},{format_minor(each.minor, each.currency)},{each.currency},"
        f"{IBAN},{each.written}"
        for each in transfers
    ]
    return "\n".join(["id,date,amount,currency,account,text", *rows, ""])
