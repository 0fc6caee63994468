"""The device that remembers: what it samples is the same in every process."""

from tests.host.device_model import EMPTY, absorb


def test_digests_do_not_depend_on_the_process() -> None:
    """Python's hashes of strings do; a failure could not be run again."""
    assert absorb(EMPTY, 1, "other") == 2604811443541701267
    assert absorb(EMPTY, 1, None) == 2646212556493064074
