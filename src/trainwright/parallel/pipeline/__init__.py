"""Pipeline parallelism: each rank holds some layers, and micro-batches pass from stage to stage."""
