"""Draw the bits, blocks and scales of a format, from what the format says of itself.

python docs/figures/make.py            # writes docs/figures/NAME.svg for each name of NAMES
"""

import re
from pathlib import Path

from duotone import formats

NAMES = (
    "fp8_e4m3_tensor",
    "fp8_e5m2_row",
    "fp8_e4m3_1x128",
    "fp8_e4m3_128x128",
    "mxfp8_e4m3",
    "mxfp6_e2m3",
    "mxfp4",
    "nvfp4",
)
PARTS = (("sign", "#c2410c"), ("exponent", "#1d4ed8"), ("mantissa", "#047857"))
CELL, ROWS, COLS = 16, 8, 16
SHADES = ("#1d4ed8", "#60a5fa", "#0f766e", "#5eead4")
STYLE = "font-family: system-ui, sans-serif; font-size: 13px; fill: #64748b"


def bits(element: str) -> list[str]:
    """Boxes for the bits of one element, and their names."""
    exponent, mantissa = map(int, re.fullmatch(r"e(\d)m(\d)", element).groups())  # type: ignore[union-attr]
    lines, at = [f'<text x="10" y="24" style="{STYLE}">an element: {element.upper()}</text>'], 10
    for row, ((name, color), count) in enumerate(zip(PARTS, (1, exponent, mantissa), strict=True)):
        for i in range(count):
            lines.append(f'<rect x="{at + 18 * i}" y="36" width="16" height="22" rx="2" fill="{color}"/>')
        lines.append(f'<rect x="10" y="{72 + 22 * row}" width="9" height="9" fill="{color}"/>')
        lines.append(f'<text x="26" y="{81 + 22 * row}" style="{STYLE}">{name}, {count} bit{"s" * (count != 1)}</text>')
        at += 18 * count
    return lines


def block(fmt: formats.Format) -> tuple[int, int, str]:
    """Rows and columns of one scale in the drawing, and the words below it."""
    kind = fmt.describe()["block"]
    if kind == "tensor":
        return ROWS, COLS, "one scale for all of it"
    if kind == "row":
        return 1, COLS, "a scale for each row"
    rows, cols = map(int, str(kind).split("x"))
    return (ROWS // 2 if rows > 1 else 1), COLS // 4, f"a scale for each {rows} x {cols}"


def draw(fmt: formats.Format) -> str:
    description = fmt.describe()
    rows, cols, words = block(fmt)
    left, top = 210, 36
    lines = bits(str(description["element"]))
    lines.append(f'<text x="{left}" y="24" style="{STYLE}">a matrix, {words}</text>')
    for i in range(ROWS):
        for j in range(COLS):
            shade = SHADES[(2 * (i // rows) + j // cols * (1 if cols < COLS else 0)) % 4]
            place = f'x="{left + CELL * j}" y="{top + CELL * i}"'
            lines.append(f'<rect {place} width="{CELL - 2}" height="{CELL - 2}" rx="2" fill="{shade}"/>')
    right = left + CELL * COLS + 30
    lines.append(f'<text x="{right}" y="24" style="{STYLE}">its scales: {description["scale"]}</text>')
    for i in range(ROWS // rows):
        for j in range(COLS // cols):
            shade = SHADES[(2 * i + (j if cols < COLS else 0)) % 4]
            place = f'x="{right + 18 * j}" y="{top + CELL * rows * i}"'
            lines.append(f'<rect {place} width="14" height="14" rx="7" fill="{shade}"/>')
    size = f"{description['bits_per_element']} bits an element"
    lines.append(f'<text x="{right}" y="{top + CELL * ROWS + 22}" style="{STYLE}">{size}</text>')
    title = f"{description['name']}: {description['element']} elements, {words}, scales in {description['scale']}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 740 200" role="img" aria-label="{title}">'
    return "\n".join([head, f"<title>{title}</title>", *lines, "</svg>\n"])


if __name__ == "__main__":
    for name in NAMES:
        Path(__file__).with_name(f"{name}.svg").write_text(draw(formats.get(name)))
