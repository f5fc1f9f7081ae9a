"""`tollhouse plan`: which devices, how many and at what cost, for a rate and objectives."""

import argparse
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

from core.errors import BadRequest, TollhouseError
from core.settings import load_settings
from engine.errors import EngineError
from engine.planning import measured
from engine.planning.devices import devices
from engine.planning.plan import Question, answers
from engine.planning.precision import KV_BYTES, PRECISIONS
from engine.planning.step_times import SERVERS
from engine.planning.workload import Workload
from gateway.admin.output import add_json, say, show
from gateway.admin.planning import report, tables
from gateway.admin.planning.own_prices import SoldAt
from gateway.admin.planning.question import (
    Described,
    PlanOptions,
    model_by_name,
    model_of_file,
    question_of,
    seconds_of,
    unknown_model,
)

HELP = "plan devices: what fits, how fast, what binds, how many replicas, and the cost"


def configure(parser: argparse.ArgumentParser) -> None:
    gpus = ", ".join(dict.fromkeys(each.name for each in devices().values()))
    ask = parser.add_argument
    ask(
        "--model",
        default="",
        help="a published model's name, a config.json, a directory or a .gguf file",
    )
    ask("--gpu", default="h100", help=f"one or more, separated by commas: {gpus}")
    ask("--count", type=int, default=0, help="devices that there are; default: as many as it takes")
    ask("--tp", type=int, default=0, help="tensor parallelism; default: what costs least")
    ask("--pp", type=int, default=0, help="stages of a pipeline")
    ask("--dp", type=int, default=0, help="replicas of attention before the same experts")
    ask("--ep", type=int, default=0, help="ranks that hold whole experts")
    ask("--quantization", default="", metavar="TYPE", help=f"of weights: {', '.join(PRECISIONS)}")
    ask("--kv-dtype", default="", metavar="TYPE", help=f"of cached values: {', '.join(KV_BYTES)}")
    ask("--rate", type=float, default=20.0, help="requests a second (default: 20)")
    ask("--concurrency", type=float, default=0.0, help="requests at once, in place of --rate")
    ask("--prompt", type=float, default=1000.0, help="tokens of a prompt (default: 1000)")
    ask("--output", type=float, default=300.0, help="tokens of an answer (default: 300)")
    ask(
        "--shared-prefix",
        type=float,
        default=0.0,
        metavar="TOKENS",
        help="that all prompts begin with",
    )
    ask("--adapters", type=int, default=0, help="LoRA adapters on the devices at once")
    ask("--adapter-rank", type=int, default=16)
    ask("--ttft", default="300ms", help="objective of the first token, such as 300ms; 0: none")
    ask("--tpot", default="40ms", help="objective of each further token, such as 40ms; 0: none")
    ask("--acceptance", type=float, default=0.0, help="share of guessed tokens that prove right")
    ask("--guesses", type=int, default=0, help="tokens guessed in a step")
    ask("--server", default="", help=f"whose overheads: {', '.join(SERVERS)}; default: their mean")
    ask("--gpu-price", type=float, default=0.0, metavar="USD", help="of a device and hour")
    ask(
        "--sold-as", default="", metavar="MODEL", help="the model whose price here gives the margin"
    )
    ask(
        "--from-traffic", default="", metavar="7d", help="take rate and lengths from the usage here"
    )
    ask(
        "--engine",
        default="",
        metavar="URL",
        help="plan a running engine, by its /metrics, instead",
    )
    ask("--seed", type=int, default=1, help="of the arrivals that are simulated with --engine")
    ask(
        "--validate", type=Path, metavar="CSV", help="judge the formulas by measured points instead"
    )
    add_json(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.validate is not None:
        return _validate(arguments)
    if arguments.from_traffic:
        _take_traffic(arguments)
    if arguments.engine:
        return _own_engine(arguments)
    if not arguments.model:
        raise BadRequest(
            "--model is missing.",
            next_step="Name a published model, a config.json or a .gguf file; or give --validate FILE.",
        )
    names = [each.name for each in fields(PlanOptions)]
    options = PlanOptions(**{name: getattr(arguments, name) for name in names})
    question = question_of(options, _model(arguments.model))
    if arguments.concurrency:
        question = tables.at_concurrency(question, arguments.concurrency)
    found = plan_of(question)
    sold = _sold(arguments.sold_as or arguments.model)
    shown = report.described(question, found, sold)
    if arguments.json:
        show(shown | {"curve": report.curve(found[0])}, as_json=True)
    else:
        for title, rows in tables.of_plan(shown):
            show(rows, as_json=False, title=title)
            show("", as_json=False)
    return 0 if shown["plan"]["holds"] else 1


def plan_of(question: Question) -> Any:
    """`answers`, with the planner's errors as the command's."""
    try:
        return answers(question)
    except EngineError as error:
        raise BadRequest(
            error.message, next_step="Correct the option that the message names."
        ) from None


def _model(name: str) -> Described:
    path = Path(name).expanduser()
    if path.exists():
        return model_of_file(path)
    found = model_by_name(name)
    if found is not None:
        return found
    from gateway.catalog.model_source import local_copy

    copy = None
    if "/" not in name or name.count("/") == 1:
        try:
            copy = local_copy(name, load_settings().data_dir)
        except TollhouseError:
            copy = None
    if copy is None:
        raise unknown_model(name)
    return model_of_file(copy)


def _sold(model: str) -> SoldAt | None:
    """None without a database: a plan needs none."""
    from gateway.admin.console import command_context
    from gateway.admin.planning.own_prices import sold_at

    try:
        with command_context() as tools, tools.database.read() as session:
            return sold_at(
                session, Path(model).stem if Path(model).exists() else model, tools.clock.now()
            )
    except TollhouseError:
        return None


def _take_traffic(arguments: argparse.Namespace) -> None:
    """The rate of the busiest hour, and the mean lengths."""
    from gateway.admin.console import command_context
    from gateway.admin.planning.from_traffic import period_of, traffic

    period = period_of(arguments.from_traffic)
    model = arguments.sold_as or arguments.model
    if not model:
        raise BadRequest(
            "--model is missing.", next_step="Name the model whose usage is planned for."
        )
    with command_context() as tools, tools.database.read() as session:
        found = traffic(session, model, tools.clock.now() - period)
    for name in ("rate", "prompt", "shared_prefix", "output"):
        setattr(arguments, name, found[name])
    if not arguments.json:
        show(found, as_json=False, title=f"usage of {model}, by the busiest hour")


def _own_engine(arguments: argparse.Namespace) -> int:
    from gateway.admin.planning.own_engine import own_steps, simulated

    own = own_steps(arguments.engine)
    try:
        work = Workload(
            rate=arguments.rate,
            prompt=arguments.prompt,
            output=arguments.output,
            shared=arguments.shared_prefix,
            ttft=seconds_of(arguments.ttft, "ttft"),
            tpot=seconds_of(arguments.tpot, "tpot"),
        )
    except EngineError as error:
        raise BadRequest(error.message, next_step="Correct the option.") from None
    show(simulated(own, work, arguments.seed), as_json=arguments.json, title="engine")
    return 0


def _validate(arguments: argparse.Namespace) -> int:
    try:
        points, left = measured.read(arguments.validate)
        found = measured.judge(points)
    except EngineError as error:
        raise BadRequest(error.message, next_step="Correct the file and run it again.") from None
    if arguments.json:
        show(found | {"left_out": dict(left)}, as_json=True)
        return 0
    rows = [
        {
            "models": kind,
            "points": each["points"],
            "output token": _percent(each["tpot_mape"]),
            "median": _percent(each["tpot_median"]),
            "first token": _percent(each["ttft_mape"]),
            "its median": _percent(each["ttft_median"]),
        }
        for kind, each in found.items()
    ]
    show(rows, as_json=False, title="mean absolute errors")
    _say_left(left)
    return 0


def _say_left(left: Counter[str]) -> None:
    for reason, count in left.most_common():
        say(f"left out {count}: {reason}")


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"
