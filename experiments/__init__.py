"""All that measures: emulated clusters, trainings, benchmarks, predictions, reports."""
