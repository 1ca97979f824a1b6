"""The `zbpipe` command.

Each command imports what `import zbpipe` has not loaded inside its functions, so that the other commands start fast.
None of these imports hides a cycle. A command has one parameter per option, so some have more than 7.
"""

import click

from zbpipe.cli.base import Group, in_one_line
from zbpipe.cli.demo.command import demo
from zbpipe.cli.doctor import doctor
from zbpipe.cli.estimating import estimate, measure
from zbpipe.cli.planning import plan
from zbpipe.cli.show import compare, export, list_, playground, show, simulate, validate
from zbpipe.schedule.user_code import import_modules


@click.group(cls=Group, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zbpipe", prog_name="zbpipe")
@click.option(
    "--import",
    "modules",
    multiple=True,
    metavar="MODULE",
    help="Import this module first, which registers schedules; it may be in the current folder.",
)
@click.pass_context
def main(context: click.Context, modules: tuple[str, ...]) -> None:
    """Zero-bubble pipeline schedules for torch.distributed.pipelining and TorchTitan.

    NAME is the name of a schedule, in any case (`zbpipe list` has them), the path of a .csv file in torch's
    compute-only format, or file.py:function for your own schedule.
    """
    with in_one_line(ValueError):
        import_modules(modules)
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (
    *(list_, show, simulate, compare, plan, estimate, measure, export, validate, playground, demo, doctor),
):
    main.add_command(command)
