"""Capacity plan: devices for a rate and objectives, goodput over load, what binds, and the formulas."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from core.errors import BadRequest
from dashboards import charts
from dashboards.page_data import Chart, Form, Input, PageData, Tile, show
from dashboards.pages.common import deps_of, operator_of, wants_csv
from dashboards.render import page, svg
from dashboards.scales import Number
from dashboards.tables import Column, Table

PATH = "/operator/plan"
_LEAD = (
    "Which devices a model needs for a rate and two objectives, how fast they are, what binds and what a "
    "million tokens costs. Means of planned devices, by formulas whose factors are fitted to measured "
    "points. `tollhouse plan` and `GET /admin/v1/plan` give the same numbers."
)
# (name, label, first value, hint)
_FIELDS = (
    ("model", "Model", "llama-3.1-8b", "a published name"),
    ("gpu", "Devices", "h100", "separated by commas"),
    ("quantization", "Weights", "", "such as fp8; as published"),
    ("kv_dtype", "Cache", "", "such as fp8; bf16"),
    ("rate", "Requests a second", "20", ""),
    ("prompt", "Prompt tokens", "1000", ""),
    ("output", "Output tokens", "300", ""),
    ("shared_prefix", "Shared prefix", "0", "tokens"),
    ("ttft", "First token", "300", "ms; 0: no objective"),
    ("tpot", "Output token", "40", "ms; 0: no objective"),
    ("adapters", "Adapters", "0", ""),
    ("count", "Devices there are", "0", "0: any"),
    ("tp", "Tensor parallel", "0", "0: the cheapest"),
    ("gpu_price", "Device price", "0", "USD an hour; 0: as listed"),
)
_WORDS = ("model", "gpu", "quantization", "kv_dtype")
_OPTIONAL = ("quantization", "kv_dtype")
CURVE = [
    Column("rate", "Requests/s of a replica", "figure"),
    Column(
        "goodput", "Goodput", "figure", "Requests a second that meet both objectives in the mean."
    ),
    Column("batch", "At once", "figure"),
    Column("ttft_ms", "First token, ms", "figure"),
    Column("tpot_ms", "Output token, ms", "figure"),
    Column("binds", "Binds"),
    Column("breaks", "Breaks", about="The first objective or resource that does not hold."),
]
OTHERS = [
    Column("gpu", "Device"),
    Column("layout", "Layout"),
    Column("roles", "Roles"),
    Column("devices", "Devices", "figure"),
    Column("rate_within_objectives", "Holds up to, requests/s", "figure"),
    Column("per_hour", "USD an hour", "figure"),
    Column("binds", "Binds"),
    Column("state", "Objectives", "badge"),
]
FACTS = [Column("name", "What"), Column("value", "Value"), Column("how", "How")]


def page_of(request: Request) -> Response:
    operator_of(request, "operations")
    written, problem, shown = _asked(request)
    if wants_csv(request) and shown is not None:
        return _curve(shown).csv("plan")
    made = _answer(shown) if shown is not None else PageData("", "")
    data = PageData("Capacity plan", _LEAD, problem=problem)
    return show(
        request, data, 400 if problem else 200, "plan.html",
        asked=_form(written), part=made, problem="",
    )  # fmt: skip


def part_of(request: Request) -> Response:
    """The answer alone, for the sliders."""
    operator_of(request, "operations")
    _, problem, shown = _asked(request)
    made = _answer(shown) if shown is not None else PageData("", "")
    return page(request, "plan_part.html", 200, part=made, problem=problem)


def _asked(request: Request) -> tuple[dict[str, str], str, Mapping[str, Any] | None]:
    """What was written, what is wrong with it, and the plan."""
    written = {name: first for name, _, first, _ in _FIELDS}
    for name in written:
        given = request.query_params.get(name)
        if given is not None:
            written[name] = given[:200]
    try:
        return written, "", deps_of(request).backend.plan(written)
    except BadRequest as error:
        return written, str(error), None


def _form(written: Mapping[str, str]) -> Form:
    inputs = [
        Input(
            name,
            label,
            "text" if name in _WORDS else "number",
            written[name],
            required=name not in _OPTIONAL,
            hint=hint,
        )
        for name, label, _, hint in _FIELDS
    ]
    return Form(PATH, "Plan", inputs=inputs, method="get")


def _answer(shown: Mapping[str, Any]) -> PageData:
    plan, cost, knee = shown["plan"], shown["cost"], shown["knee"]
    margin = cost["margin"]
    tiles = [
        Tile(
            "Devices",
            f"{plan['devices']} × {plan['gpu']}",
            f"{plan['replicas']} × {plan['layout']}, {_roles(plan['roles'])}",
            state="good" if plan["holds"] else "bad",
        ),
        Tile("First token", f"{plan['ttft_ms']:.0f} ms", _against(shown["workload"]["ttft_ms"])),
        Tile("Output token", f"{plan['tpot_ms']:.1f} ms", _against(shown["workload"]["tpot_ms"])),
        Tile("Binds", plan["binds"], f"{100 * plan['shares'][plan['binds']]:.0f} % of the time"),
        Tile(
            "A million output tokens",
            _usd(cost["per_million_output_tokens"]),
            f"{_usd(cost['per_hour'])} an hour",
        ),
        Tile(
            "Goodput used",
            "–" if plan["goodput_used"] is None else f"{100 * plan['goodput_used']:.0f} %",
            f"holds up to {plan['rate_within_objectives']:g} requests/s",
        ),
    ]
    if margin is not None and margin["per_hour"] is not None:
        tiles.append(Tile("Margin", f"{margin['per_hour']:,.2f} USD", "an hour at your own price"))
    rates = [f"{point['rate']:.3g}" for point in shown["curve"]]
    goodput = charts.Series("goodput", [point["goodput"] for point in shown["curve"]])
    offered = charts.Series("offered", [point["rate"] for point in shown["curve"]])
    drawn = charts.lines("Goodput over load, a replica", rates, [goodput, offered], _plain)
    shares = [
        charts.Series(name, [point["shares"][name] * 100 for point in shown["curve"]])
        for name in plan["shares"]
    ]
    bound = charts.stacked_bars("What takes the time, %", rates, shares, _plain)
    return PageData(
        "",
        "",
        tiles=tiles,
        remarks=[_remark(shown, knee)],
        charts=[
            Chart(
                f"Goodput of a replica; the knee is at {knee['rate']:.3g} requests/s", svg(drawn)
            ),
            Chart("What takes the time, % by requests/s", svg(bound)),
        ],
        tables=[_curve(shown), _others(shown), _facts(shown), _formulas(shown)],
    )


def _remark(shown: Mapping[str, Any], knee: Mapping[str, Any]) -> str:
    if shown["plan"]["holds"]:
        return (
            f"The knee of a replica is at {knee['rate']:.3g} requests/s with {knee['batch']:.0f} at "
            f"once. There, {knee['binds']} binds."
        )
    why = {
        "memory": "The model or a single request does not fit: take more ranks or a smaller type.",
        "ttft": "A prompt alone takes longer than the first token may: take more ranks.",
        "tpot": "A step alone takes longer than an output token may: take more ranks.",
        "compute": "Prompts alone take all of the time.",
    }
    return (
        f"The objectives do not hold. {why.get(knee['breaks'] or '', 'There are too few devices.')}"
    )


def _curve(shown: Mapping[str, Any]) -> Table:
    rows = [point | {"breaks": point["breaks"] or ""} for point in shown["curve"]]
    return Table("Goodput over load, a replica", CURVE, rows, totals=False)


def _others(shown: Mapping[str, Any]) -> Table:
    rows = [
        each
        | {
            "state": "good" if each["holds"] else "bad",
            "per_hour": "–" if each["per_hour"] is None else each["per_hour"],
        }
        for each in shown["others"]
    ]
    return Table("Other ways", OTHERS, rows, totals=False, empty="There is no other way.")


def _facts(shown: Mapping[str, Any]) -> Table:
    model, memory, roofline, device = (
        shown[name] for name in ("model", "memory", "roofline", "device")
    )
    dated = f" on {device['price_date']}" if device["price_date"] else ""
    ridge = roofline["ridge_batch"]
    rows = [
        ("Parameters", _billions(model["parameters"]), ""),
        ("Parameters of a token", _billions(model["active_parameters"]), ""),
        ("Weights", _gib(memory["weight_bytes"]), f"of a replica, as {model['quantization']}"),
        ("KV of a token", f"{model['kv_bytes_per_token'] / 1024:,.1f} KiB", ""),
        ("KV of a request", _gib(model["kv_bytes_per_request"]), ""),
        ("Adapter", _gib(model["adapter_bytes"]), "each, in 16 bits"),
        ("Memory", _gib(memory["usable_bytes"]), "of a replica that is used"),
        ("Requests that fit", f"{memory['requests_that_fit']:,}", "at the same time"),
        ("Prompt", f"{1000 * roofline['prompt_s']:.1f} ms", "its chunks, without queue"),
        ("Decode step", f"{1000 * roofline['decode_step_s']:.2f} ms", "of a single sequence"),
        ("Ridge", "none" if ridge is None else f"{ridge:,} at once", "compute binds above"),
        ("Bandwidth", f"{device['bandwidth_tb_s']:g} TB/s", device["source"]),
        (
            "Price of a device",
            "not known" if device["price_per_hour"] is None else _usd(device["price_per_hour"]),
            f"an hour; {device['price_source'] or ''}{dated}",
        ),
        ("Factors", f"{shown['fit']['points']:,} points", f"fitted on {shown['fit']['date']}"),
    ]  # fmt: skip
    return Table(
        "Sizes and sources",
        FACTS,
        [{"name": name, "value": value, "how": how} for name, value, how in rows],
        totals=False,
    )


def _formulas(shown: Mapping[str, Any]) -> Table:
    columns = [Column("name", "What"), Column("formula", "Formula")]
    return Table("Formulas", columns, _rows(shown["formulas"]), totals=False)


def _rows(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(each) for each in found]


def _roles(roles: str) -> str:
    return "prompts and answers" if roles == "both" else roles


def _against(objective: float | None) -> str:
    return "no objective" if objective is None else f"objective {objective:g} ms"


def _usd(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f} USD"


def _billions(count: float) -> str:
    return f"{count / 1e9:,.2f} B"


def _gib(count: float) -> str:
    return f"{count / 2**30:,.2f} GiB"


def _plain(value: Number) -> str:
    return f"{float(value):.4g}"


ROUTES = [Route(PATH, page_of), Route(f"{PATH}/part", part_of)]
