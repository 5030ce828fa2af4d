"""One picture a file: ``draw(rows, ax) -> ax`` puts a table into axes.

Rows are chosen and brought into the units of the axes, nothing else is computed; nothing is loaded, and no global style
is set.
"""
