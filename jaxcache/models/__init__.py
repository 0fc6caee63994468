"""Reference models (Flax NNX) that run from the cache."""

from jaxcache.models.checkpoint import read_config as read_config
from jaxcache.models.hybrid import HybridModel as HybridModel
from jaxcache.models.parameters import (
    parameter_shardings as parameter_shardings,
    place_model as place_model,
)
from jaxcache.models.registry import (
    ARCHITECTURES as ARCHITECTURES,
    TINY_CONFIG as TINY_CONFIG,
    load_model as load_model,
    random_model as random_model,
)
from jaxcache.models.step_context import last_tokens as last_tokens
