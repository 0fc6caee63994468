"""What leaves XLA: moving a request from the machines that prefill to those that decode."""

if __name__ != "jaxcache.transfer":
    raise ImportError("import `jaxcache.transfer`; `transfer` is only a folder name")
