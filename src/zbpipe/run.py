"""`python -m zbpipe.run`: run a script, unchanged, with one of zbpipe's schedules.

    torchrun ... -m zbpipe.run --schedule ZBV -- script.py its arguments
    torchrun ... -m zbpipe.run --schedule ZBV -- -m package.module its arguments

With `--schedule`, the job gets this schedule for every name that it asks torch for. Without, zbpipe's names are valid,
too. The options are those of `zbpipe.install`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from zbpipe.schedule import registry, user_code
from zbpipe.schedule.garbage import importing


def main(arguments: list[str] | None = None) -> None:
    """Install zbpipe's schedules, then run the script or module as `python` would."""
    given = sys.argv[1:] if arguments is None else arguments
    _require_known_schedule(given)
    user_code.require_torch("python -m zbpipe.run")
    with importing():  # not before: torch is imported for seconds
        from zbpipe.frameworks.installation import install_with, list_asked
        from zbpipe.frameworks.options import from_arguments
        from zbpipe.runtime.ranks.failures import end_at_once, share_with_other_ranks
    parser = _parser()
    found = parser.parse_args(given)
    target = found.module or (found.target[1:] if found.target[:1] == ["--"] else found.target)
    is_module = bool(found.module) or target[:1] == ["-m"]
    target = target[1:] if target[:1] == ["-m"] else target
    if not target:
        parser.error("name the script to run, or -m and a module: python -m zbpipe.run --schedule ZBV -- script.py")
    if not is_module and not Path(target[0]).is_file():
        parser.error(f"there is no script {target[0]!r}; for a module, put -m before its name")
    options = from_arguments(parser, vars(found))
    try:
        with importing():
            install_with(options, found.schedule, everywhere=found.schedule is not None)
    except ValueError as error:
        parser.error(str(error))
    with end_at_once(), share_with_other_ranks():
        _run(target, is_module)
    if found.schedule is not None and not list_asked():
        _say(
            f"the job never asked torch for a schedule by name, so it did not use {found.schedule}: if it uses one of"
            " torch's classes, make it call zbpipe.build_pipeline_schedule instead"
        )


def _require_known_schedule(arguments: list[str]) -> None:
    """Refuse a wrong name in the first option. In others the parser finds it, which needs torch."""
    name = arguments[1] if arguments[:1] == ["--schedule"] and len(arguments) > 1 else None
    if name is not None and "--import" not in arguments:  # modules of the user may register schedules
        try:
            registry.resolve(name)
        except ValueError as error:
            print(f"python -m zbpipe.run: error: {error}", file=sys.stderr)
            sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    from zbpipe.frameworks.options import add_arguments

    parser = argparse.ArgumentParser(
        prog="python -m zbpipe.run",
        description="Run a training script with one of zbpipe's schedules.",
        allow_abbrev=False,
    )
    parser.add_argument("--schedule", metavar="NAME", help="zbpipe's or torch's name, a .csv file, or file.py:function")
    add_arguments(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)  # torchrun drops a "--"
    parser.add_argument(
        "target", nargs=argparse.REMAINDER, metavar="-- script.py | -m module", help="and its arguments"
    )
    return parser


def _run(target: list[str], is_module: bool) -> None:
    sys.argv = target
    if is_module:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(target[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(target[0]).resolve().parent))
        runpy.run_path(target[0], run_name="__main__")


def _say(words: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"zbpipe: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
