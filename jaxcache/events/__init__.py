"""What becomes restorable and what ceases to be, as a stream for routers. No JAX.

    prefix tree --Listener--> EventStream --Batch--> Mirror          in one process
                                          --Batch--> Publisher ~~~> Subscriber, Mirror

A cache is described by its pages *and* its snapshots, since a prefix of a model with
recurrent layers can be restored only where both are. A `Mirror` that gets every batch
answers `restorable(tokens)` as the manager's own lookup would.

`records` is what travels, `hashing` is how pages and positions are named, `stream`
listens, `mirror` follows, `publisher` carries batches over ZeroMQ. Nothing is hashed
until somebody listens.

msgspec is a dependency of jaxcache itself: the manager makes the structs, and it is
small and needs nothing else. pyzmq is not, as only `publisher` needs it.
"""
