"""Prometheus' remote write, 1.0 and 2.0: decodes a request's body to columns. No IO, no Trio.

`negotiation` determines a request's version, `snappy` decompresses within a bound, `protobuf_fields` reads protobuf
fields with numpy, `series_interner` and `series` give each label set a number, `histograms` resolves native histograms,
`decode` combines them; `series_validator` is the receiver's, which stores no series. `remote_pb2` is generated from
`remote.proto` by `make generate`.
"""
