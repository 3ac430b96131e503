"""Reports: result files, bootstrap intervals, tables, plots, the HTML report and model cards."""
