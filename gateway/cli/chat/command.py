"""`tollhouse chat`: a conversation with a running gateway, in the terminal or line by line."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import suppress

from core.errors import BadRequest, SettingError
from core.settings import Settings, load_settings
from gateway.cli.chat.session import HELP as KEYS
from gateway.cli.chat.session import ChatClient, ChatSession
from gateway.serving.record import url_here

HELP = "chat with a running gateway; without a terminal, each line of the input is a question"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="default: the first that the gateway lists")
    parser.add_argument("--url", default="", help="default: the gateway of the data directory")
    parser.add_argument(
        "--key", default="", help="API key; default: demo-key of the data directory"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    settings = load_settings()
    client = ChatClient(arguments.url or url_here(settings), arguments.key or _key(settings))
    session = ChatSession(client, _model(client, arguments.model), _write, _remark)
    if sys.stdin.isatty():
        _remark(f"{session.model} at {client.url}. {KEYS}.")
    for line in _typed() if sys.stdin.isatty() else sys.stdin:
        if not session.handle(line):
            break
    return 1 if session.failed and not sys.stdin.isatty() else 0


def _typed() -> Iterator[str]:
    with suppress(ImportError):
        import readline  # noqa: F401, arrow keys and a history for `input`
    while True:
        try:
            yield input("> ")
        except EOFError:
            _remark("")
            return
        except KeyboardInterrupt:
            _remark("\nCtrl-D quits.")


def _model(client: ChatClient, name: str) -> str:
    known = client.models()
    if name and name not in known:
        raise BadRequest(
            f"There is no model {name!r}; available: {', '.join(known)}.",
            next_step="Name one of them with --model.",
        )
    if not known:
        raise BadRequest("This key may use no model.", next_step="Give another with --key.")
    return name or known[0]


def _key(settings: Settings) -> str:
    file = settings.data_dir / "demo-key"
    try:
        return file.read_text().strip()
    except OSError as error:
        raise SettingError(
            f"There is no key: {file} cannot be read ({error.strerror}).",
            next_step="Give one with --key, or set TOLLHOUSE_DATA_DIR to the gateway's directory.",
        ) from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _remark(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
