"""The durable spool between the receiver and Spark: what was answered with success is in it, on the disk.

`records` frames records, `marks` keeps positions, `repair` mends what a crash left, `writer` appends, `reader` reads in
other processes, `retention` removes what was consumed. No Trio here: the writer blocks and is called in a thread.
"""
