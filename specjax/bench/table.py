"""Plain-text tables for a terminal and for Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table whose columns line up; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    columns = list(zip(header, *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(_is_number(cell) for cell in column[1:]) for column in columns]

    def line(row):
        placed = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "| " + " | ".join(placed) + " |"

    rule = "|" + "|".join(
        "-" * (width + 1) + (":" if right else "-")
        for width, right in zip(widths, numeric, strict=True)
    )
    return "\n".join([line(header), rule + "|", *map(line, cells)])


def _is_number(cell: str) -> bool:
    return cell.strip().rstrip("x%").replace(".", "", 1).lstrip("-").isdigit()
