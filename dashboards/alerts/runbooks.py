"""The runbooks as Markdown, for docs/runbooks.md."""

import re

from dashboards.alerts.alert import Alert
from dashboards.alerts.catalog import ALERTS
from dashboards.alerts.rules import PAGE
from dashboards.formats import LINK

_LEAD = f"""# Runbooks
One section for each alert of `dashboards/grafana/alerts.yaml`: what it means, how to see it, what to do,
and when it is over. The page Alerts (`/dashboard{PAGE}`) has the same text, and says which of the
conditions hold now; the annotation `runbook_url` of each alert leads there. Pages below are given by
their path on the gateway. NAME and ID stand for your own.
"""


def page() -> str:
    return _LEAD + "".join(_section(each) for each in ALERTS)


def _section(alert: Alert) -> str:
    book = alert.runbook
    hold = f"when this has held for {alert.hold}" if alert.hold else "as soon as this holds"
    lines = [f"\n## {alert.name}", f"{alert.summary}. Severity: {alert.severity}.", ""]
    lines += [f"Raised {hold}:", "", "```promql", alert.condition, "```", book.means, ""]
    lines += ["See it:", "", *(f"- {each}" for each in book.see), ""]
    lines += ["What to do:", "", *(f"{n}. {each}" for n, each in enumerate(book.do, 1)), ""]
    lines += ["When it is over:", "", book.over, ""]
    return LINK.sub(_link, "\n".join(lines))


def _link(found: re.Match[str]) -> str:
    words, target = found[1], found[2]
    if target.startswith("#"):
        return f"[{words}]({target.lower()})"
    return f"{words} (`/dashboard{target}`)"
