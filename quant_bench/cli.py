"""The command `quant-bench`: a group of what lies in `quant_bench.commands`."""

import click

from quant_bench import __version__
from quant_bench.commands.check import check
from quant_bench.commands.common import Commands, example
from quant_bench.commands.compare import compare
from quant_bench.commands.data import data
from quant_bench.commands.demo import demo
from quant_bench.commands.doctor import doctor
from quant_bench.commands.listing import list_command
from quant_bench.commands.merge import merge
from quant_bench.commands.new import new
from quant_bench.commands.publish import publish
from quant_bench.commands.quantize import quantize
from quant_bench.commands.report import report_command
from quant_bench.commands.run import run
from quant_bench.commands.site import site
from quant_bench.commands.submit_check import submit_check
from quant_bench.commands.train import train


@click.group(cls=Commands, epilog=example("quant-bench run smollm2-135m-instruct --quantizer w8a8 --task wikitext2"))
@click.version_option(__version__, prog_name="quant-bench")
def main() -> None:
    """Does this language model survive W8A8 and W4A4, and why?

    Exit codes: 0, 1 when a cell failed, 2 when a command was not understood.
    """


for _command in (
    check,
    compare,
    data,
    demo,
    doctor,
    list_command,
    merge,
    new,
    publish,
    quantize,
    report_command,
    run,
    site,
    submit_check,
    train,
):
    main.add_command(_command)
