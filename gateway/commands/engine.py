"""`tollhouse engine`: runs an engine worker for gateways. The options are those of `engine.server`."""

HELP = "run an engine worker; `tollhouse engine --help` shows its options"


def main(options: list[str]) -> int:
    from engine.server import main as serve

    return serve(options)
