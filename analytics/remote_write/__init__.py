"""Prometheus' remote write, 1.0 and 2.0: from a request's body to columns. No IO, no Trio.

`negotiation` says which version a request is, `snappy` decompresses within a bound, `wire` walks protobuf fields in
numpy, `series` gives each label set one number, `histograms` resolves native histograms, `decode` puts it together.
`remote_pb2` is generated from `remote.proto` by `make generate`.
"""
