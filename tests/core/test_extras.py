"""What needs an extra that is not installed says which, and how to install it."""

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from billing.archive.opening import make_archive
from billing.exports.encoding import format_of
from billing.exports.formats import Column, Format, encode
from billing.invoicing.printing import as_pdf
from billing.stores import S3Store
from core.clock import SystemClock
from core.errors import MissingExtra, SettingError, TollhouseError
from core.extras import imports_of
from core.settings import Settings
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.worker.server import make_runner
from gateway.cli.doctor.packages import EXTRAS, extras
from gateway.cli.main import main
from gateway.metering.streams.opening import open_stream
from gateway.serving.payments import make_payments, make_taxes
from gateway.serving.tracing import make_tracer


def parquet() -> None:
    list(encode([(1,)], [Column("a")], Format.PARQUET))


def traced() -> None:
    make_tracer(Settings(tracing_endpoint="http://127.0.0.1:9"))


def archived() -> None:
    make_archive(Settings(events_url="clickhouse://a", database_url="postgresql://b/c"))


def paid() -> None:
    make_payments(Settings(stripe_api_key="sk_test_1"))


def taxed() -> None:
    make_taxes(Settings(stripe_api_key="sk_test_1", taxes="stripe"), SystemClock())


@pytest.mark.parametrize(
    ("extra", "module", "call", "kind"),
    [
        ("nats", "nats", lambda: open_stream("nats://127.0.0.1"), SettingError),
        ("kafka", "confluent_kafka", lambda: open_stream("kafka://127.0.0.1"), SettingError),
        ("clickhouse", "clickhouse_connect", archived, SettingError),
        ("pdf", "weasyprint", lambda: as_pdf(""), MissingExtra),
        ("parquet", "pyarrow", parquet, MissingExtra),
        ("parquet", "pyarrow", lambda: format_of("parquet"), MissingExtra),
        ("s3", "boto3", S3Store("bucket", "").probe, MissingExtra),
        ("tracing", "opentelemetry.sdk.trace", traced, SettingError),
        ("stripe", "stripe", paid, SettingError),
        ("stripe", "stripe", taxed, SettingError),
    ],
)
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch,
    extra: str,
    module: str,
    call: Callable[[], object],
    kind: type[TollhouseError],
) -> None:
    ours = ("billing.archive.server", "billing.payments.stripe.", "gateway.metering.streams.")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(kind) as caught:
        call()
    assert f"the extra '{extra}'" in caught.value.message
    assert f"pip install 'tollhouse[{extra}]'" in caught.value.next_step


def test_other_formats_need_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert format_of("csv") is Format.CSV
    assert list(encode([(1,)], [Column("a")], Format.JSONL))


def test_an_error_within_an_installed_package_stays_as_it_is() -> None:
    with pytest.raises(ImportError), imports_of("pdf", "An invoice as PDF"):
        from json import nothing_of_that_name  # type: ignore[attr-defined]  # noqa: F401


def test_a_missing_system_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            raise OSError("cannot load library 'libpango-1.0-0'\nand more")

    monkeypatch.setitem(sys.modules, "weasyprint", Broken())  # type: ignore[arg-type]
    with pytest.raises(MissingExtra, match=r"libpango-1.0-0'.*Install Pango"):
        as_pdf("")


def test_an_engine_without_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engine.runners.cpu.runner", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"'engine': torch .*pip install 'tollhouse\[engine\]'"):
        make_runner(EngineConfig(model="any"), fake=False)


def test_serve_without_torch_or_upstreams_ends_before_it_makes_anything(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    data = tmp_path / "data"
    assert main(["serve", "--port", "0", "--data-dir", str(data)]) == 1
    said = capsys.readouterr().err
    assert "'engine'" in said and "tollhouse[engine]" in said and "TOLLHOUSE_UPSTREAMS" in said
    assert not data.exists()


def test_doctor_lists_the_extras_of_the_project(monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {*EXTRAS} == {*project["optional-dependencies"]} - {"all", "dev", "train"}
    monkeypatch.setitem(sys.modules, "weasyprint", None)
    monkeypatch.setitem(EXTRAS, "tracing", "not_installed.inner")
    there, _, missing = extras(Settings(), SystemClock()).says.partition("; not installed: ")
    assert "parquet" in there and {"pdf", "tracing"} <= {*missing.split(", ")}
