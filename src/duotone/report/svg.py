"""SVG as text. Everything is escaped on the way in, so no chart can be broken by a name."""

from markupsafe import Markup, escape


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """One element. In attribute names a trailing underscore is dropped, the others become dashes."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_value(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    body = Markup("").join(children)
    return Markup(f"<{name}{pairs}>{body}</{name}>" if body else f"<{name}{pairs}/>")


def picture(label: str, width: float, height: float, *children: str, class_: str) -> Markup:
    """The root of a chart: an image with a name, `width` pixels wide, or less where the page is narrow."""
    return tag(
        "svg",
        *children,
        class_=f"chart {class_}",
        width=width,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_label=label,
    )


def shorten(text: str, length: int) -> str:
    """`text`, with its middle replaced by an ellipsis when it is longer than `length` characters."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return f"{text[: length - 1 - tail]}…{text[len(text) - tail :]}"


def _value(value: object) -> str:
    """Coordinates keep one decimal: a tenth of a pixel is finer than any screen shows."""
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)
