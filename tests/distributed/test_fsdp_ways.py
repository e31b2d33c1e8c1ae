"""Ways to use FSDP2 on two gloo processes; fsdp_ways_worker.py holds the checks."""

WORKER = "fsdp_ways_worker.py"


def test_fsdp_ways(failures, check) -> None:
    assert not failures(WORKER, check)
