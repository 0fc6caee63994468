"""Fingerprints: what two processes must agree on before they exchange slots.

Left out on purpose is what may differ between peers: the number of shards (a slot is
units, and units are matched by index) and which layers a pipeline stage holds (layers
are matched by id).
"""

import hashlib
import json
from collections.abc import Sequence

from jaxcache.layouts.model import Layer
from jaxcache.layouts.retention import Retention, Window

# Conventions that no field says: change the number when one of them changes.
# * convolution columns run from the oldest input to the newest;
# * a row has absorbed exactly the tokens of its position, and none after it;
# * pages hold tokens in order, page i of a request from token i * tokens_per_page.
CONVENTIONS = 1


def fingerprint(
    name: str, layers: Sequence[Layer], tokens_per_page: int, order: str
) -> str:
    """Returns the SHA-256 of a canonical description, the same in every process."""
    description = {
        "conventions": CONVENTIONS,
        "model": name,
        "tokens_per_page": tokens_per_page,
        "order": order,
        "layers": [
            {
                "layer_id": layer.layer_id,
                "retention": _describe_retention(layer.kind.retention),
                "buffers": [
                    [spec.role, spec.units, list(spec.unit_shape), spec.dtype]
                    for spec in layer.kind.buffers(tokens_per_page)
                ],
            }
            for layer in layers
        ],
    }
    text = json.dumps(description, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _describe_retention(retention: Retention) -> list[object]:
    if isinstance(retention, Window):
        return ["window", retention.window, retention.sink_tokens]
    return ["recurrent" if retention.is_recurrent else "full"]
