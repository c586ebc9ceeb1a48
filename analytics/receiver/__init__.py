"""The remote-write receiver: an HTTP server on Trio and h11 that writes requests to the spool.

`http_server` serves HTTP/1.1 connections, `write_endpoint` handles one write request, `request_parser` decodes it,
`group_commit` batches writes to the disk, `tokens` authenticates senders, `fair_lock` bounds what they may use,
`admin_endpoint` serves the operators' pages, `service` wires these together and `command` is the command line.
"""
