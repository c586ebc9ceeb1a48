"""The remote-write receiver: HTTP on Trio and h11 in front of the spool.

`http` speaks HTTP, `write` decides about one request, `commit` groups what goes to the disk, `tokens` and `tls` let
senders in, `rates` holds them back, `probes` answers operators, `service` puts it together, `command` starts it.
"""
