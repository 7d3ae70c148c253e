"""`python -m steptuned`, `torchrun -m steptuned` and the command `steptuned`."""

import sys


def main() -> None:
    try:
        from steptuned.lab.cli import app
        from steptuned.lab.ranks import closing_process_group
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("steptuned"):
            raise
        sys.exit(
            f"steptuned: the laboratory needs more packages ({error.name} is missing): "
            "pip install 'steptuned[lab]'"
        )
    with closing_process_group():
        app(prog_name="steptuned")


if __name__ == "__main__":
    main()
