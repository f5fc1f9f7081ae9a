"""The installed `tollhouse` command. It looks at where Python finds the packages before it imports them:
their names are common, and with another distribution's in their place the start ends in a traceback.
"""

import sys

from gateway.edge.release import shadowed


def main() -> int:
    """1 where a package is another distribution's, else the exit code of the command."""
    for name, place in shadowed().items():
        print(
            f"tollhouse: the package {name!r} is not Tollhouse's: Python finds it in {place}.\n"
            "Install Tollhouse in a virtual environment of its own, and unset PYTHONPATH.",
            file=sys.stderr,
        )
        return 1
    from gateway.cli.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
