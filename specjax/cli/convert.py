"""``specjax convert``: the converter's own command line."""


def add(commands) -> None:
    commands.add_parser("convert", help="convert a checkpoint; see specjax convert --help")


def run(arguments: list[str]) -> int:
    from ckpt_convert.__main__ import main as convert

    return convert(arguments)
