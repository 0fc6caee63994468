"""Every plan that a manager makes in these tests passes the checks of `Packer.pack`."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from jaxcache.host import planning
from jaxcache.inputs.buckets import Bucket
from jaxcache.inputs.packing import PackedInputs, Packer, StepWork
from jaxcache.prefixes.nodes import Int32s


class CheckedPacker(Packer):
    def pack_unchecked(
        self, work: StepWork, bucket: Bucket, prefill_tokens: Sequence[Int32s]
    ) -> PackedInputs:
        inputs = super().pack_unchecked(work, bucket, prefill_tokens)
        if prefill_tokens:
            work.prefill_tokens = np.concatenate(prefill_tokens)
        checked = Packer(self.layout, self.size, self.buckets).pack(work)
        assert checked.bucket == inputs.bucket
        np.testing.assert_array_equal(checked.packed, inputs.packed)
        return inputs


@pytest.fixture(scope="package", autouse=True)
def _check_every_plan() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "Packer", CheckedPacker)
        yield
