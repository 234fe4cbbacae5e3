"""Cost models, fits and advice: what is predicted and chosen before a run."""
