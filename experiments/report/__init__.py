"""Results as data frames and JSON, tables, plots, numbers with units: what every experiment reports with."""
