"""Elastic, exact fine-tuning of large language models on Ray."""
