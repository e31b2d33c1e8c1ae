"""torch's styles on Duotone's modules, two gloo processes; styles_worker.py holds the checks. One test starts them."""

from launching import names

WORKER = "styles_worker.py"


def test_styles(failures) -> None:
    assert not [text for text in (failures(WORKER, one) for one in names(WORKER)) if text]
