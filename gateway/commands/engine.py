"""`tollhouse engine`: an engine worker of its own, for gateways to use. Options are the engine's."""

HELP = "run an engine worker; `tollhouse engine --help` shows its options"


def main(options: list[str]) -> int:
    from engine.server import main as serve

    return serve(options)
