"""Tables of the paper: their printed figures as data, ours next to them, one page of both."""
