"""Tables and curves of the paper: printed figures as data, ours next to them, pages of both."""
