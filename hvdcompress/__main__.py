"""The ``hvdcompress`` command, also ``python -m hvdcompress``. Its packages are in the extra ``cli``."""

import sys


def main() -> None:
    """Run the command, or say in one line how to install what it needs."""
    try:
        from hvdcompress.cli.app import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"hvdcompress: the command needs {error.name}: pip install 'hvdcompress[cli]'", file=sys.stderr)
        sys.exit(2)
    run()


if __name__ == "__main__":
    main()
