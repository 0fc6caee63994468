"""Test set-up: four CPU devices, strict promotion, derandomised properties."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
)

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "jaxcache", deadline=None, derandomize=True, max_examples=30
)
hypothesis.settings.load_profile("jaxcache")
