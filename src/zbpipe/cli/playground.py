"""`playground`: schedules side by side in the browser."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from zbpipe.cli.base import Command, OutputFile


@click.command(cls=Command)
@click.option("--port", type=click.IntRange(0, 65535), default=0, metavar="N", help="Default: a free one.")
@click.option("--browser/--no-browser", default=True, show_default=True, help="Open the page in the browser.")
@click.option(
    "--export",
    "file",
    type=OutputFile(),
    metavar="FILE.html",
    help="Write a page that needs no server, with the answers for some sizes and typical times, in place of serving.",
)
def playground(port: int, browser: bool, file: Path | None) -> None:
    """Try schedules in the browser: sliders for sizes, times and memory.

    Two schedules, one above the other, next to the best plan found and the lower bound. It runs on this
    machine only, until Ctrl-C.

    \b
    Examples:
      zbpipe playground
      zbpipe playground --export playground.html
    """
    if file is None:
        _serve(port, browser)
        return
    from zbpipe.views.playground.page import make_exported_page

    with click.progressbar(length=100, label="planning", file=sys.stderr) as bar:
        text = make_exported_page(lambda share: bar.update(round(100 * share) - bar.pos))
    file.write_text(text, encoding="utf-8")
    click.echo(f"wrote {file}, {len(text) / 1e6:.1f} MB")


def _serve(port: int, browser: bool) -> None:
    from zbpipe.views.playground.server import server

    try:
        listening = server(port)
    except OSError as error:
        raise ValueError(f"--port {port} cannot be used ({error.strerror}): omit it for a free one") from None
    with listening as started:
        host, taken = started.server_address[:2]
        address = f"http://{host!s}:{taken}/"
        click.echo(f"the playground is at {address}; Ctrl-C ends it")
        if browser:
            import webbrowser

            webbrowser.open(address)
        try:
            started.serve_forever()
        except KeyboardInterrupt:
            click.echo()
