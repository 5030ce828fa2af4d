"""One picture a file: ``draw(rows, ax) -> ax`` puts a table into axes. No arithmetic, no loading, no global style."""
