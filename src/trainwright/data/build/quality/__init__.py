"""Quality of documents: classifiers and scorers, filters by their scores, judged labels, synthetic rows."""
