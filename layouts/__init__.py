"""What bytes lie where: static, hashable descriptions of cache memory."""

if __name__ != "jaxcache.layouts":
    raise ImportError("import `jaxcache.layouts`; `layouts` is only a folder name")
