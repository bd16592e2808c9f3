"""Reports: comparison rows, tables, figures and pages."""
