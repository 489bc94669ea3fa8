"""Is the model better: loss by source and language, answers on held-out questions, tuned beside base, with intervals."""
