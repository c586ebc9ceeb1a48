"""The durable spool between the receiver and Spark: every request acknowledged with success is in it, on the disk.

`records` frames records, `positions` stores positions in files, `repair` truncates torn ends after a crash, `writer`
appends, `reader` reads in other processes, `retention` removes consumed segments. There is no Trio here: the writer
blocks and is called in a thread.
"""
