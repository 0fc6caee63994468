"""A small serving loop for the demo, the tests and the benchmarks."""

from jaxcache.engine.engine import Engine as Engine, default_buckets as default_buckets
from jaxcache.engine.model_step import (
    CachedModel as CachedModel,
    ModelStep as ModelStep,
    Sampled as Sampled,
    greedy as greedy,
)
from jaxcache.engine.request import (
    Finish as Finish,
    Progress as Progress,
    Request as Request,
    Result as Result,
)
