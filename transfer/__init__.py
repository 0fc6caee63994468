"""What leaves XLA: moving a request from prefill machines to decode machines."""

if __name__ != "jaxcache.transfer":
    raise ImportError("import `jaxcache.transfer`; `transfer` is only a folder name")
