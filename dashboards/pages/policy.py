"""The policy editor: dry runs on recorded decisions, activation, and the version history."""

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import Any

from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest, TollhouseError
from core.tenants import keys, organisations
from core.tenants.scope import TenantScope
from dashboards.formats import share
from dashboards.page_data import Form, Input, PageData, Tile, show
from dashboards.pages.common import Fields, deps_of, form_handler, redirect_with_notice, viewer_of
from dashboards.scales import grouped
from dashboards.tables import Column, Table
from moderation import policies
from moderation.categories import SCORED
from moderation.classifiers.load import load_classifier
from moderation.dry_run import DryRun, dry_run, trial_of
from moderation.policy import Policy
from moderation.records import every_decision
from moderation.screener import Screener
from moderation.verdict import ScreenedText, Verdict

PATH = "/safety/policy"
DRY_RUN_DAYS, DRY_RUN_MAX_DECISIONS = 30, 5_000
THRESHOLDS = [
    Column("category", "Category"),
    Column("input", "Input: annotate, redact, block from", "figure", "Scores range from 0 to 1."),
    Column("output", "Output: annotate, redact, block from", "figure"),
]
VERSIONS = [
    Column("at", "Activated", "moment"),
    Column("of", "Applies to"),
    Column("version", "Version", "code", "Digest of the policy document."),
    Column("state", "State", "badge"),
    Column("by", "By", "code"),
]
CHANGES = [
    Column("was", "Recorded"),
    Column("would", "With this policy"),
    Column("count", "Decisions", "whole"),
]

SAMPLE = [
    Column("direction", "Screened as"),
    Column("action", "Action", "badge"),
    Column("flagged", "Flagged"),
    Column("matched", "Matched text"),
]


@dataclass(frozen=True, slots=True)
class Sample:
    """A text that somebody typed, and a policy's verdicts on it as a prompt and as an answer."""

    text: str
    verdicts: dict[str, Verdict]

    @classmethod
    def of(cls, text: str, policy: Policy) -> "Sample":
        screener, texts = Screener(load_classifier()), [ScreenedText("user", text)]
        prompt = replace(policy, roles=frozenset({"user"}))
        answer = replace(prompt, input=policy.output)
        return cls(
            text,
            {
                "prompt": screener.check_input(texts, prompt),
                "answer": screener.check_input(texts, answer),
            },
        )


def page_of(
    request: Request,
    document: str = "",
    place: str = "",
    dry_run_result: DryRun | None = None,
    sample: "Sample | None" = None,
    problem: str = "",
) -> Response:
    viewer, deps = viewer_of(request, "moderation"), deps_of(request)
    with deps.database.read() as session:
        targets = _targets(session, viewer.scope)
        history = policies.history(session, viewer.scope)
        live = policies.in_force(session, viewer.scope, "", "")
    can_edit = deps.auth.may(viewer, "moderation", "write")
    rows = [_version(each, targets, can_edit) for each in history]
    columns = [*VERSIONS, Column("acts", "Change", "acts")] if can_edit else VERSIONS
    text = document or json.dumps(live.to_dict(), indent=1)
    tables = [
        Table(
            "Thresholds in force for the organisation", THRESHOLDS, _thresholds(live), totals=False
        )
    ]
    if dry_run_result is not None:
        tables.insert(0, _dry_run_table(dry_run_result))
        if dry_run_result.untried:
            tables.insert(0, _untried_table(dry_run_result))
    if sample is not None:
        tables.insert(0, _sample_table(sample))
    page_data = PageData(
        "Safety policy",
        "A key's policy takes precedence, then its project's, then the organisation's, then the default.",
        tiles=_dry_run_tiles(dry_run_result) if dry_run_result else [],
        tables=tables,
        forms=[_threshold_form(place), _document_form(text, place, targets, sample)]
        if can_edit
        else [],
        after=[
            Table("Versions", columns, rows, totals=False, empty="The default policy is in force.")
        ],
        back=("/safety", "Safety"),
        problem=problem,
    )
    return show(request, page_data, 400 if problem else 200)


def _targets(session: Session, scope: TenantScope) -> dict[str, str]:
    found = {f"tenant:{scope.tenant_id}": "the organisation"}
    found |= {
        f"project:{p.id}": f"project {p.name}" for p in organisations.projects(session, scope)
    }
    names = keys.current_names(session, scope)
    return found | {f"key:{first_id}": f"key {name}" for first_id, name in names.items()}


def _thresholds(policy: Policy) -> list[dict[str, Any]]:
    def _said(screen: Any, category: str) -> str:
        found = screen.categories.get(category)
        values = (found.annotate, found.redact, found.block) if found else (None, None, None)
        return " · ".join("–" if value is None else f"{value:g}" for value in values)

    return [
        {"category": name, "input": _said(policy.input, name), "output": _said(policy.output, name)}
        for name in SCORED
    ]


def _version(each: Any, targets: dict[str, str], can_edit: bool) -> dict[str, Any]:
    of = targets.get(f"{each.level}:{each.target}", f"{each.level} {each.target}")
    live = each.retired_at is None
    fields = {"act": "retire", "place": f"{each.level}:{each.target}", "name": of}
    return {
        "at": each.created_at,
        "of": of,
        "version": each.version,
        "state": "active" if live else "retired",
        "by": each.created_by,
        "acts": [Form(PATH, "Retire", fields, confirm=of, danger=True)]
        if live and can_edit
        else [],
    }


def _dry_run_tiles(dry_run_result: DryRun) -> list[Tile]:
    return [
        Tile(
            "Tested on",
            grouped(dry_run_result.decided),
            f"decisions of the last {DRY_RUN_DAYS} days",
        ),
        Tile(
            "Would change at least" if dry_run_result.untried else "Would change",
            grouped(dry_run_result.changed),
            f"{len(dry_run_result.untried)} rules could not be tried"
            if dry_run_result.untried
            else share(dry_run_result.changed, dry_run_result.decided),
        ),
        Tile(
            "Version",
            dry_run_result.policy_version[4:12],
            about="First digits of the digest of the document.",
        ),
    ]


def _dry_run_table(dry_run_result: DryRun) -> Table:
    rows = [
        {"was": was, "would": would, "count": count}
        for (was, would), count in sorted(dry_run_result.changes.items(), key=lambda pair: -pair[1])
    ]
    empty = "There are no recorded decisions to test it on. You can still activate it."
    caption = "Effect on recorded decisions. The policy is not active yet."
    return Table(caption, CHANGES, rows, totals=False, empty=empty)


def _untried_table(dry_run_result: DryRun) -> Table:
    rows = [{"rule": name} for name in dry_run_result.untried]
    caption = (
        "Not tried: no text is stored, so what these rules find is unknown. Try them on a sample, or "
        "count them on live traffic."
    )
    return Table(caption, [Column("rule", "Rule")], rows, totals=False)


def _sample_table(sample: "Sample") -> Table:
    rows = [
        {
            "direction": direction,
            "action": verdict.action.word,
            "flagged": ", ".join(verdict.flagged) or "–",
            "matched": " · ".join(sample.text[s.start : s.end] for s in verdict.spans) or "–",
        }
        for direction, verdict in sample.verdicts.items()
    ]
    return Table("The sample under this policy", SAMPLE, rows, totals=False)


def _threshold_form(place: str) -> Form:
    inputs = [
        Input("category", "Category", "select", "", [(name, name) for name in SCORED]),
        Input(
            "direction", "Direction", "select", "input", [("input", "input"), ("output", "output")]
        ),
        Input("annotate", "Annotate from", "number", required=False, hint="0 to 1; empty: never"),
        Input("redact", "Redact from", "number", required=False),
        Input("block", "Block from", "number", required=False),
    ]
    about = "Tests the active policy with one threshold changed. This does not activate anything."
    return Form(
        PATH,
        "Test",
        {"act": "threshold", "place": place},
        inputs,
        title="One threshold",
        about=about,
    )


def _document_form(text: str, place: str, targets: dict[str, str], sample: "Sample | None") -> Form:
    inputs = [
        Input("place", "Applies to", "select", place, list(targets.items())),
        Input("document", "Policy", "area", text),
        Input(
            "sample",
            "Sample text",
            "area",
            sample.text if sample else "",
            required=False,
            hint="A test screens it as a prompt and as an answer. It is not stored.",
        ),
    ]
    return Form(
        PATH,
        "Test on recorded decisions",
        {},
        inputs,
        title="Policy document",
        about="Thresholds, terms, patterns, entities, streaming, strikes. A test changes nothing.",
        also=(("trial", "Count new rules on live traffic"), ("put", "Activate")),
        act="try",
    )


def _test(request: Request, form_fields: Fields) -> Response:
    text = form_fields.get("document", "")
    return _dry_run(
        request, text, form_fields.get("place", ""), form_fields.get("sample", "").strip()
    )


def _dry_run(request: Request, text: str, place: str, sample: str = "") -> Response:
    viewer, deps = viewer_of(request, "moderation", "write"), deps_of(request)
    now = deps.clock.now()
    try:
        policy = Policy.from_dict(_json(text))
    except TollhouseError as error:
        return page_of(request, text, place, problem=f"{error.message} {error.next_step}".strip())
    with deps.database.read() as session:
        found = every_decision(session, viewer.scope, now - timedelta(DRY_RUN_DAYS), now)
        in_force = policies.in_force(session, viewer.scope, "", "")
        dry_run_result = dry_run(policy, islice(found, DRY_RUN_MAX_DECISIONS), in_force)
    tried = Sample.of(sample, policy) if sample else None
    return page_of(request, text, place, dry_run_result, tried)


def _threshold(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "moderation", "write"), deps_of(request)
    with deps.database.read() as session:
        document = policies.in_force(session, viewer.scope, "", "").to_dict()
    try:
        values = {
            name: float(form_fields[name])
            for name in ("annotate", "redact", "block")
            if form_fields.get(name)
        }
    except ValueError:
        raise BadRequest(
            "A threshold is not a number.",
            next_step="Write a number from 0 to 1, or leave it empty.",
            param="annotate",
        ) from None
    direction = "output" if form_fields.get("direction") == "output" else "input"
    document[direction]["categories"][form_fields.get("category", "")] = values
    return _dry_run(request, json.dumps(document, indent=1), form_fields.get("place", ""))


def _trial(request: Request, form_fields: Fields) -> Response:
    """Activates the policy with its new rules only counting."""
    return _activate(request, form_fields, trial=True)


def _activate(request: Request, form_fields: Fields, *, trial: bool = False) -> Response:
    viewer, deps = viewer_of(request, "moderation", "write"), deps_of(request)
    text = form_fields.get("document", "")
    try:
        with deps.database.transaction() as session:
            level, target = _target_of(session, viewer.scope, form_fields)
            document = _json(text)
            if trial:
                in_force = policies.in_force(
                    session,
                    viewer.scope,
                    target if level == "project" else "",
                    target if level == "key" else "",
                )
                document = trial_of(Policy.from_dict(document), in_force).to_dict()
            policies.put(session, viewer.scope, deps.clock, document, level=level, target=target)
    except BadRequest as error:
        said = f"{error.message} {error.next_step}".strip()
        return page_of(request, text, form_fields.get("place", ""), problem=said)
    deps.backend.changed()
    return redirect_with_notice(request, PATH, "policy-put")


def _retire(request: Request, form_fields: Fields) -> Response:
    viewer, deps = viewer_of(request, "moderation", "write"), deps_of(request)
    with deps.database.transaction() as session:
        targets = _targets(session, viewer.scope)
        level, target = _target_of(session, viewer.scope, form_fields)
        if form_fields.get("confirm") != targets.get(f"{level}:{target}"):
            raise BadRequest(
                "The confirmation does not match the name.",
                next_step=f"Type {targets.get(f'{level}:{target}')!r} and send the form again.",
            )
        policies.retire(session, viewer.scope, deps.clock, level=level, target=target)
    deps.backend.changed()
    return redirect_with_notice(request, PATH, "policy-retired")


def _target_of(session: Session, scope: TenantScope, form_fields: Fields) -> tuple[str, str]:
    place = form_fields.get("place", "")
    if place not in _targets(session, scope):
        raise BadRequest("There is no such project or key.", next_step="Choose one from the list.")
    level, _, target = place.partition(":")
    return level, target


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadRequest(
            f"The policy is not valid JSON: {error}.",
            next_step="Correct the document and try again.",
            param="document",
        ) from None
    if not isinstance(found, dict):
        raise BadRequest(
            f"The policy is a JSON {type(found).__name__}, not an object.",
            next_step="Write the document as a JSON object.",
            param="document",
        )
    return found


ROUTES = [
    Route(PATH, page_of, methods=["GET"]),
    Route(
        PATH,
        form_handler(
            page_of,
            **{
                "try": _test,
                "trial": _trial,
                "put": _activate,
                "threshold": _threshold,
                "retire": _retire,
            },
        ),
        methods=["POST"],
    ),
]
