"""Documents of the project and what writes them."""
