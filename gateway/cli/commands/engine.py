"""`tollhouse engine`: runs an engine worker. The options are those of `engine.worker.server`."""

HELP = "run an engine worker; `tollhouse engine --help` shows its options"


def main(options: list[str]) -> int:
    from engine.worker.server import main as serve

    return serve(options)
