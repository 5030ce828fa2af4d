"""One experiment a file: the protocol of one published measurement, or one benchmark of kvprobe itself."""
