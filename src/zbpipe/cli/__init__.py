"""The `zbpipe` command. Everything heavy is imported by the command that needs it."""

import click

from zbpipe import __version__
from zbpipe.cli.base import Group
from zbpipe.cli.demo import demo
from zbpipe.cli.planning import plan
from zbpipe.cli.show import compare, list_, show, simulate
from zbpipe.cli.tables import export, validate


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zbpipe")
@click.pass_context
def main(context: click.Context) -> None:
    """Zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

    NAME is the name of a schedule, in any case (`zbpipe list` has them), or the path of a .csv file in torch's
    compute-only format.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (list_, show, simulate, compare, plan, export, validate, demo):
    main.add_command(command)
