"""Building corpora: readers, stages of cleaning and deduplication, writers, and the pipeline that runs them."""
