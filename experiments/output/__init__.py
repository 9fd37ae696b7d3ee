"""Numbers, tables, pages, plots and folders of results."""
